"""What the parts of an attention exchange: the encoded source, what earlier steps attended to, and a step's result.

Shapes: B batch, S source positions, T target positions, N heads, M memory, A attention, F features, Q query.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nmt.attention.steering import Detail, Steering


class Memory(NamedTuple):
    """The encoded source sentences. With N heads, each sentence has N consecutive rows: B is N times as large."""

    values: Tensor  # (B, S, M) encoder states
    keys: Tensor  # (B, S, A) their projection for the score, computed once per sentence
    valid: Tensor  # (B, S) bool, True = may be attended to
    mask: Tensor | None = None  # (B, 1, S) to add to energies: 0 where valid, else the lowest number
    projection: Tensor | None = None  # (A, F) of a KeyUpdate
    heads: int = 1
    chunk_keys: Tensor | None = None  # (B, S, A) for the score within the chunks of monotonic chunkwise attention
    chunk_projection: Tensor | None = None  # (A, F) of the KeyUpdate of that score
    steering: Steering | None = None
    detailed: bool = False  # whether `Attended.detail` is returned

    @property
    def sentences(self) -> int:
        """The number of sentences."""
        return self.valid.shape[0] // self.heads

    def select(self, index: Tensor) -> Self:
        """Select sentences of the batch, int64 (N,), for beam search."""
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
        """A memory whose attention is steered at some steps, in all heads alike."""
        return self._replace(steering=steering.repeat(self.heads))


class Past(NamedTuple):
    """What earlier steps attended to. An attention that does not read the past only counts its steps."""

    weights: Tensor  # (B, S), or (B, N, S) with heads: of the previous step, zeros before the first
    total: Tensor  # the same shape: the sum of the weights of all steps (coverage)
    step: int  # index of the next step
    log_stops: Tensor | None = None  # the same shape: log-probabilities of where monotonic reading stopped
    means: Tensor | None = None  # (B, K), or (B, N, K): of a Gaussian mixture, from 1; None before the first step

    @classmethod
    def start(cls, valid: Tensor) -> Self:
        """The past before the first step: bool (B, S) or (B, N, S)."""
        nothing = torch.zeros(valid.shape, device=valid.device)
        return cls(nothing, nothing, 0)

    def after(self, weights: Tensor, log_stops: Tensor | None) -> Self:
        """The past after a step with weights (..., 1, S)."""
        weights = weights.squeeze(-2)
        log_stops = None if log_stops is None else log_stops.squeeze(-2)
        return self._replace(weights=weights, total=self.total + weights, step=self.step + 1, log_stops=log_stops)

    def corrected(self, weights: Tensor) -> Self:
        """The past with other weights (B, S) of the previous step."""
        return self._replace(weights=weights, total=self.total - self.weights + weights)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to each tensor."""
        return self._replace(
            weights=function(self.weights),
            total=function(self.total),
            log_stops=None if self.log_stops is None else function(self.log_stops),
            means=None if self.means is None else function(self.means),
        )

    def select(self, index: Tensor) -> Self:
        """Select rows of the batch, int64 (N,), for beam search."""
        return self.map(lambda tensor: tensor.index_select(0, index))


class Choice(NamedTuple):
    """How hard attention sampled its positions, for REINFORCE."""

    log_prob: Tensor  # (B, T) of the sampled position (with heads: their sum); 0 where none was sampled
    entropy: Tensor  # (B, T) in nats, of the distribution it was sampled from
    query: Tensor  # (B, T, Q)


class Attended(NamedTuple):
    """The result of one or more steps of attention."""

    context: Tensor  # (B, T, M)
    weights: Tensor  # (B, T, S), with heads their mean
    past: Past  # after these steps
    log_weights: Tensor | None = None  # (B, T, S), -inf where the weight is exactly 0; see Normalized
    log_stops: Tensor | None = None  # (B, T, S) of monotonic reading, before a chunk divides them
    choice: Choice | None = None  # of hard attention in training
    detail: Detail | None = None  # if the memory asks for it


def join_steps(steps: Sequence[Attended]) -> Attended:
    """Join successive steps of T = 1; the past is that after the last."""
    log_weights = [step.log_weights for step in steps if step.log_weights is not None]
    choices = [step.choice for step in steps if step.choice is not None]
    details = [step.detail for step in steps if step.detail is not None]
    return Attended(
        torch.cat([step.context for step in steps], dim=1),
        torch.cat([step.weights for step in steps], dim=1),
        steps[-1].past,
        torch.cat(log_weights, dim=1) if log_weights else None,
        choice=Choice(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True))) if choices else None,
        detail=Detail.join(details) if details else None,
    )
