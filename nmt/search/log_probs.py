"""From the logits of a step to the log-probabilities of the tokens that may come next."""

import math

import torch
from torch import Tensor

from nmt.search.hypothesis import Symbols
from nmt.search.topk import BLOCK


class LogProbs:
    """Normalises and masks, step after step, in one buffer: it never writes to the model's own logits.

    What it returns therefore holds until the next call, and may be overwritten until then.
    """

    def __init__(self, symbols: Symbols, min_length: int, device: torch.device) -> None:
        assert symbols.eos not in symbols.banned
        self._eos = symbols.eos
        self._min_length = min_length
        self._banned = torch.tensor(symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self._buffer = torch.empty(0, 0, device=device)

    def __call__(self, logits: Tensor, length: int, at_max: list[bool]) -> Tensor:
        """(N, V) -> (N, V') float32, -inf for what may not come; V' is V padded with -inf to whole blocks.

        `length` counts the token to be chosen; rows that are `at_max` may only end. Masking does not
        renormalise: the values are the model's own.
        """
        rows, vocabulary = logits.shape
        if len(self._buffer) < rows:
            columns = -(-vocabulary // BLOCK) * BLOCK
            self._buffer = torch.full((rows, columns), -math.inf, device=logits.device)
        log_probs = self._buffer[:rows]
        torch.log_softmax(logits, -1, dtype=torch.float32, out=log_probs[:, :vocabulary])
        self._mask(log_probs, length, at_max)
        return log_probs

    def _mask(self, log_probs: Tensor, length: int, at_max: list[bool]) -> None:
        end = log_probs[:, self._eos]
        forced_end = end.clone()
        log_probs.index_fill_(1, self._banned, -math.inf)
        if length <= self._min_length:
            end.fill_(-math.inf)
        if any(at_max):
            forced = torch.tensor(at_max).to(log_probs.device, non_blocking=True)
            log_probs.masked_fill_(forced[:, None], -math.inf)
            end.copy_(torch.where(forced, forced_end, end))
