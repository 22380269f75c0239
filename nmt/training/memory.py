"""Batches that memory does not suffice for: the same update from more parts."""

import logging
import math
from collections.abc import Callable

from nmt.config.errors import UserError
from nmt.machine import release_memory
from nmt.training import checkpoint
from nmt.training.step import DoesNotFit, Update

log = logging.getLogger(__name__)


class MicroBatcher:
    """In how many parts a batch is processed: in as many as asked for, and in more where these do not fit.

    Gradients of the parts add up to that of the batch (dropout draws other masks).
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.too_many = math.inf  # padded tokens of the smallest part that did not fit

    def __call__(self, attempt: Callable[[int], Update], sentences: int, tokens: int, name: str) -> Update:
        """The update from a batch of so many sentences and padded tokens; `attempt` makes it from so many parts.

        Raises UserError if a sentence alone does not fit.
        """
        parts = self.least
        while tokens / parts >= self.too_many and parts < sentences:
            parts *= 2
        before = checkpoint.random_state()
        while True:
            try:
                return attempt(parts)
            except DoesNotFit:
                checkpoint.restore_random_state(before)
            release_memory()  # here, where no traceback holds tensors any more
            self.too_many = min(self.too_many, tokens / parts)
            if parts >= sentences:
                raise UserError(
                    f"{name}: memory does not suffice for one pair at a time; take a smaller model, a smaller "
                    "data.max_length or tokenizer.vocab_size, or precision=bf16; checkpoints so far are untouched"
                )
            parts *= 2
            log.warning(
                "%s: no memory for %d pairs at a time: batches of %d tokens and more are processed in parts (as "
                "training.accumulate does)",
                name,
                -(-2 * sentences // parts),
                tokens * 2 // parts,
            )
