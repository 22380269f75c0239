"""One update of the weights, from a batch in one part or, where memory asks for it, in several."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.data.batching import Batch, Indices
from nmt.model.seq2seq import Seq2Seq
from nmt.system.distributed import GradientSum
from nmt.system.machine import Machine, is_out_of_memory, release_memory
from nmt.training.graphs import GraphedPasses
from nmt.training.losses.objective import Objective, Value

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """The outcome of an update."""

    terms: dict[str, Tensor]  # () each, of the objective: sums over target tokens, in nats
    tokens: int  # target tokens
    gradient_norm: Tensor  # () before clipping
    applied: bool  # False: the loss or gradient was not finite, and nothing was changed
    stop: bool = False  # was any process to stop?


class GlobalBatch(NamedTuple):
    """A batch that several processes share."""

    tokens: int  # target tokens
    counts: bool = True  # False on a process for which no sentence is left; it repeats one, which does not count


class LogWindow:
    """Sums since the last line of the log, kept on the device until they are read."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Tensor]] = []  # of each: the objective's terms and the gradient norm
        self.tokens = 0
        self.seconds = 0.0

    def add(self, update: Update) -> None:
        self.updates.append({**update.terms, "gradient_norm": update.gradient_norm})
        self.tokens += update.tokens

    def state(self) -> list[Any]:
        """The sums as a checkpoint stores them."""
        return [self.updates, self.tokens, self.seconds]

    @classmethod
    def load(cls, state: list[Any], device: torch.device) -> Self:
        """The sums with this state."""
        sums = cls()
        updates, sums.tokens, sums.seconds = state
        sums.updates = [{name: term.to(device) for name, term in update.items()} for update in updates]
        return sums

    def means(self) -> dict[str, float]:
        """Means over at least one update: terms per target token, the gradient norm per update."""
        names = list(self.updates[0])
        columns = [torch.stack([update[name].float() for update in self.updates]) for name in names]
        totals = torch.stack(columns).cpu().double().sum(1).tolist()
        counts = [len(self.updates) if name == "gradient_norm" else self.tokens for name in names]
        return {name: total / count for name, total, count in zip(names, totals, counts, strict=True)}


class BadUpdates:
    """Counts updates with a non-finite loss or gradient."""

    def __init__(self, most: int, scaler: torch.amp.GradScaler) -> None:
        """most: in a row. With fp16, overflows do not count while the scaler looks for its scale."""
        self.most, self.scaler = most, scaler
        self.count, self.in_a_row = 0, 0

    def add(self, indices: Indices, step: int) -> None:
        """Count an update that was skipped, of these training pairs. Raises UserError if there are too many."""
        if self.scaler.is_enabled() and self.scaler.get_scale() > 1:
            return
        self.count += 1
        self.in_a_row += 1
        pairs = ", ".join(map(str, sorted(indices.tolist())))
        log.warning(
            "step %d: non-finite loss or gradient, skipped (pairs %s of the prepared corpus, from 0)", step, pairs
        )
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.in_a_row} non-finite losses or gradients in a row (training.max_bad_steps): start a new run "
                "with a smaller optimizer.lr or training.max_grad_norm, or with precision=fp32; "
                "training.start_from=DIR takes over the weights of this run's best checkpoint"
            )


class OutOfMemory(Exception):  # noqa: N818
    """There is not enough memory for a part of a batch."""


class Updater:
    """Forward, backward, clip, step."""

    def __init__(
        self,
        model: Seq2Seq,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        machine: Machine,
        max_graphs: int = 0,
    ) -> None:
        """max_graphs: for how many shapes of batches the passes are recorded as CUDA graphs; 0: none."""
        self.gradient_sum: GradientSum | None = None  # over several processes
        self.objective, self.optimizer, self.machine = objective, optimizer, machine
        self.max_grad_norm = torch.inf if max_grad_norm is None else max_grad_norm
        # A policy's baseline has a loss of its own: its gradient must not use up the limit of the others.
        self.policy_parameters = [] if model.policy is None else list(model.policy.parameters())
        policy = set(map(id, self.policy_parameters))
        self.parameters = [parameter for parameter in model.parameters() if id(parameter) not in policy]
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.precision == "fp16")
        self.graphed: GraphedPasses | None = None
        if max_graphs and machine.device.type == "cuda":
            pads = int(model.source_embedding.padding_idx or 0), objective.loss.pad
            self.graphed = GraphedPasses(self._passes, [*model.parameters()], pads, machine.device, max_graphs)

    def __call__(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        step: int,
        global_batch: GlobalBatch | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Update:
        """One update from the parts of one batch: each part's gradient is divided by the tokens of all parts.

        global_batch: the batch, if `batches` are only this process's share of it. stop: read after the backward pass.
        Raises OutOfMemory, on all processes, if a part does not fit on one of them. Then nothing has changed.
        """
        if global_batch is None:
            global_batch = GlobalBatch(sum(batch.target_tokens for batch in batches))
        if self.graphed is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.graphed.clear_gradients()
        self.set_rate(learning_rate)
        total = torch.zeros((), device=self.machine.device)
        try:
            terms = self._backward(batches, global_batch, step, total)
            fits = True
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            terms, fits = {}, False
        stops = stop()
        if self.gradient_sum is not None:
            total, terms, fits, stops = self._summed(total, terms, fits, stops, global_batch.counts)
        if not fits:
            raise OutOfMemory
        self.scaler.unscale_(self.optimizer)  # before clipping, so that the norm is that of the true gradient
        norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        policy_norm = nn.utils.clip_grad_norm_(self.policy_parameters, self.max_grad_norm)
        applied = bool((norm + policy_norm + total).isfinite())  # what an update waits for the device for
        if applied:
            self.scaler.step(self.optimizer)
            self.objective.after_update(terms, global_batch.tokens)
        self.scaler.update()
        return Update(terms, global_batch.tokens, norm.detach(), applied, stops)

    def _backward(
        self, batches: Sequence[Batch], global_batch: GlobalBatch, step: int, total: Tensor
    ) -> dict[str, Tensor]:
        """Add up gradients, the objective in `total` (), and its terms, which it returns."""
        terms: dict[str, Tensor] = {}
        tokens = global_batch.tokens
        graphed = self.graphed if self.objective.can_be_recorded(step) else None
        for batch in batches:
            if graphed is None:
                value = self._passes(batch.to(self.machine.device), tokens, step)
            else:
                value = graphed(batch, tokens, step)
            total += value.total
            terms = {name: terms[name] + term if terms else term for name, term in value.terms.items()}
        return terms

    def _passes(self, batch: Batch, tokens: Tensor | int, step: int) -> Value:
        """The forward and the backward pass of a batch on the device, with the gradient divided by `tokens`."""
        with self.machine.autocast():
            value = self.objective(batch, step)
        torch.autograd.backward(self.scaler.scale(value.total / tokens))
        return value._replace(total=value.total.detach())

    def _summed(
        self, total: Tensor, terms: dict[str, Tensor], fits: bool, stops: bool, counts: bool
    ) -> tuple[Tensor, dict[str, Tensor], bool, bool]:
        """The same for all processes together. Gradients that do not count or are incomplete are left out."""
        assert self.gradient_sum is not None
        flags = [float(not fits), float(stops)]
        counted = [total, *terms.values()] if fits and counts else []
        failed, stopped, total, *sums = self.gradient_sum([*flags, *counted], fits and counts).unbind()
        failed_anywhere, stopped_anywhere = torch.stack([failed, stopped]).cpu().tolist()
        return total, dict(zip(terms, sums, strict=False)), not failed_anywhere, bool(stopped_anywhere)

    def release_graphs(self) -> bool:
        """Stop using CUDA graphs and free their memory. Returns whether they were in use."""
        released, self.graphed = self.graphed is not None, None
        return released

    def set_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next update."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate


class MicroBatcher:
    """Splits a batch into parts if it does not fit in memory as a whole, and remembers what size did not fit. It
    splits only if releasing other memory does not help.

    The gradients of the parts add up to that of the batch; only dropout draws other masks. With several processes, the
    batch is a process's share, and all of them split alike.
    """

    def __init__(self, parts: int, release: Callable[[], bool] = lambda: False) -> None:
        """parts: of every batch, at least (training.accumulate); release: frees memory, and says whether there was
        any."""
        self.parts, self.release = parts, release
        self.too_many = math.inf  # padded tokens of the smallest part that did not fit

    def __call__(self, attempt: Callable[[int], Update], sentences: int, tokens: float, name: str) -> Update:
        """The update of a batch with this number of sentences and padded tokens; `attempt` makes it from n parts.

        Raises UserError if a single sentence pair does not fit.
        """
        parts = self.parts
        while tokens / parts >= self.too_many and parts < sentences:
            parts *= 2
        while True:
            with suppress(OutOfMemory):
                return attempt(parts)
            released = self.release()
            release_memory()
            if released:
                log.warning("%s: out of memory: from now on without CUDA graphs", name)
                continue
            self.too_many = min(self.too_many, tokens / parts)
            if parts >= sentences:
                raise UserError(
                    f"{name}: out of memory even with one sentence pair per batch; start a new run with a smaller "
                    "model, a smaller data.max_length or tokenizer.vocab_size, or with precision=bf16"
                )
            parts *= 2
            log.warning(
                "%s: out of memory with %d sentence pairs: from now on, batches of %d or more tokens are processed in "
                "parts (as with training.accumulate)",
                name,
                -(-2 * sentences // parts),
                round(tokens * 2 // parts),
            )
