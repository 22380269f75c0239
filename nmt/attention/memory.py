"""The encoded source that attention reads, and its state between steps.

Shapes: B batch, S source positions, T target positions, L steered steps, N heads, M memory, A attention.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Steering(NamedTuple):
    """Weights that replace those an attention computes, at some of its first L steps."""

    weights: Tensor  # (B, L, S)
    steered: Tensor  # bool (B, L), the steps at which they do

    def weights_at(self, steps: range, weights: Tensor) -> Tensor:
        """(B, T, S) of T steps, or of T hypotheses at one step -> the same, with the rows of steered steps replaced."""
        if steps.start >= self.steered.shape[1]:
            return weights
        known = slice(steps.start, steps.stop)
        rows, steered = self.weights[:, known].to(weights.dtype), self.steered[:, known, None]
        if len(steps) == 1:
            return torch.where(steered, rows, weights)
        replaced = torch.where(steered, rows, weights[:, : rows.shape[1]])
        return torch.cat([replaced, weights[:, rows.shape[1] :]], dim=1)

    def log_stops_at(self, steps: range, log_stops: Tensor) -> Tensor:
        """The same for log-probabilities of where monotonic reading stops: at the last position with weight."""
        attended = self.weights > 0
        last = attended & (attended.flip(-1).cumsum(-1).flip(-1) == 1)
        return Steering(last.to(log_stops.dtype).log(), self.steered).weights_at(steps, log_stops)

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch."""
        return self._replace(weights=self.weights.index_select(0, index), steered=self.steered.index_select(0, index))


class Memory(NamedTuple):
    """The encoded source sentences. With N heads, each sentence has N consecutive rows: B is N times as large."""

    values: Tensor  # (B, S, M) encoder states
    keys: Tensor  # (B, S, A) their projection for the score, computed once per sentence
    valid: Tensor  # (B, S) bool, True = may be attended to
    mask: Tensor | None = None  # (B, 1, S) to add to energies: 0 where valid, else the lowest number
    projection: Tensor | None = None  # (A, F) of a KeyUpdate
    heads: int = 1
    chunk_keys: Tensor | None = None  # (B, S, A) for the score within the chunks of monotonic chunkwise attention
    chunk_projection: Tensor | None = None  # (A, F) of its KeyUpdate
    steering: Steering | None = None
    detailed: bool = False  # return `Attended.detail`?

    @property
    def sentences(self) -> int:
        """The number of sentences."""
        return self.valid.shape[0] // self.heads

    def select(self, index: Tensor) -> Self:
        """Sentences `index` of the batch, for beam search."""
        if self.heads > 1:
            index = (index[:, None] * self.heads + torch.arange(self.heads, device=index.device)).flatten()
        return self._replace(
            values=self.values.index_select(0, index),
            keys=self.keys.index_select(0, index),
            valid=self.valid.index_select(0, index),
            mask=None if self.mask is None else self.mask.index_select(0, index),
            chunk_keys=None if self.chunk_keys is None else self.chunk_keys.index_select(0, index),
            steering=None if self.steering is None else self.steering.select(index),
        )

    def steered(self, steering: Steering) -> Self:
        """The same memory with steered steps, in all heads alike."""
        return self._replace(steering=Steering(*(part.repeat_interleave(self.heads, dim=0) for part in steering)))


class Past(NamedTuple):
    """What earlier steps attended to. An attention that does not read this only counts steps."""

    weights: Tensor  # (B, S), or (B, N, S) with heads: of the previous step, zeros before the first
    total: Tensor  # the same shape: the running sum of the weights, coverage
    step: int  # index of the next step
    log_stops: Tensor | None = None  # the same shape: where monotonic reading stopped, as log-probabilities
    means: Tensor | None = None  # (B, K), or (B, N, K): of a Gaussian mixture, from 1; None before the first step

    @classmethod
    def start(cls, valid: Tensor) -> Self:
        """bool (B, S) or (B, N, S) -> the past before the first step."""
        nothing = torch.zeros(valid.shape, device=valid.device)
        return cls(nothing, nothing, 0)

    def after(self, weights: Tensor, log_stops: Tensor | None) -> Self:
        """The past after a step with these weights (..., 1, S)."""
        weights = weights.squeeze(-2)
        log_stops = None if log_stops is None else log_stops.squeeze(-2)
        return self._replace(weights=weights, total=self.total + weights, step=self.step + 1, log_stops=log_stops)

    def corrected(self, weights: Tensor) -> Self:
        """The past with other weights (B, S) of the previous step."""
        return self._replace(weights=weights, total=self.total - self.weights + weights)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same with all tensors changed by `function`."""
        return self._replace(
            weights=function(self.weights),
            total=function(self.total),
            log_stops=None if self.log_stops is None else function(self.log_stops),
            means=None if self.means is None else function(self.means),
        )

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, for beam search."""
        return self.map(lambda tensor: tensor.index_select(0, index))


class Choice(NamedTuple):
    """The positions that hard attention sampled, as REINFORCE needs them."""

    log_prob: Tensor  # (B, T) of the sampled position (with heads: their sum); 0 where none was sampled
    entropy: Tensor  # (B, T) in nats, of the distribution it was sampled from
    query: Tensor  # (B, T, Q)


class Detail(NamedTuple):
    """What an attention did beside its mean weights."""

    heads: Tensor  # (B, N, T, S), the weights of each head
    centres: Tensor | None  # (B, N, T) of a local window, from 0
    stops: Tensor | None  # int64 (B, N, T): where monotonic reading stopped, from 0; -1: read past the end

    @classmethod
    def of(cls, weights: Tensor, centres: Tensor | None, log_stops: Tensor | None) -> Self:
        """(B, T, S), (B, T) or None, (B, T, S) or None of one head."""
        stops = None
        if log_stops is not None:
            stops = torch.where((log_stops > -torch.inf).any(-1), log_stops.argmax(-1), -1)[:, None]
        return cls(weights[:, None], None if centres is None else centres[:, None], stops)

    @classmethod
    def joined(cls, steps: Sequence[Self]) -> Self:
        """The same of several steps, joined in their order."""
        heads, centres, stops = zip(*steps, strict=True)
        return cls(torch.cat(heads, dim=2), _joined(centres), _joined(stops))

    def by_head(self, heads: int) -> Self:
        """The rows of a batch (B N, 1, ...) as heads (B, N, ...)."""
        T, S = self.heads.shape[2:]
        return self._replace(
            heads=self.heads.view(-1, heads, T, S),
            centres=None if self.centres is None else self.centres.view(-1, heads, T),
            stops=None if self.stops is None else self.stops.view(-1, heads, T),
        )


class Attended(NamedTuple):
    """The result of one or more steps of attention."""

    context: Tensor  # (B, T, M)
    weights: Tensor  # (B, T, S), with heads their mean
    past: Past  # after these steps
    log_weights: Tensor | None = None  # (B, T, S), -inf where the weight is exactly 0; see Normalized
    log_stops: Tensor | None = None  # (B, T, S) for the past, before a chunk divides them
    choice: Choice | None = None  # of hard attention in training
    detail: Detail | None = None  # if the memory asks for it


def join_steps(steps: Sequence[Attended]) -> Attended:
    """Successive steps of T = 1 as one result, with the past of the last."""
    log_weights = [step.log_weights for step in steps if step.log_weights is not None]
    choices = [step.choice for step in steps if step.choice is not None]
    details = [step.detail for step in steps if step.detail is not None]
    return Attended(
        torch.cat([step.context for step in steps], dim=1),
        torch.cat([step.weights for step in steps], dim=1),
        steps[-1].past,
        torch.cat(log_weights, dim=1) if log_weights else None,
        choice=Choice(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True))) if choices else None,
        detail=Detail.joined(details) if details else None,
    )


def _joined(steps: Sequence[Tensor | None]) -> Tensor | None:
    """(B, N, T) of successive steps, or None of all -> (B, N, sum of T) or None."""
    present = [step for step in steps if step is not None]
    return torch.cat(present, dim=2) if present else None
