"""What attention reads, and what earlier steps leave behind.

Shapes: B batch, S source positions, T target positions, N heads, M memory, A attention.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Memory(NamedTuple):
    """The encoded source sentences. With N heads those of a sentence stand side by side: B is N times as large."""

    values: Tensor  # (B, S, M) encoder states
    keys: Tensor  # (B, S, A) their projection for the score, made once per sentence
    valid: Tensor  # (B, S) bool, True = may be attended to
    heads: int = 1

    @property
    def sentences(self) -> int:
        """How many there are."""
        return len(self.valid) // self.heads

    def select(self, index: Tensor) -> Self:
        """Sentences `index` of the batch, for beam search."""
        if self.heads > 1:
            index = (index[:, None] * self.heads + torch.arange(self.heads, device=index.device)).flatten()
        return self._replace(
            values=self.values.index_select(0, index),
            keys=self.keys.index_select(0, index),
            valid=self.valid.index_select(0, index),
        )


class Past(NamedTuple):
    """What the steps so far have attended to; only the step is counted for an attention that does not read it."""

    weights: Tensor  # (B, S), or (B, N, S) with heads: of the previous step, zeros before the first
    total: Tensor  # the same shape: their running sum, coverage
    step: int  # index of the step to come

    @classmethod
    def start(cls, valid: Tensor) -> Self:
        """bool (B, S) or (B, N, S) -> the past before the first step."""
        nothing = torch.zeros(valid.shape, device=valid.device)
        return cls(nothing, nothing, 0)

    def after(self, weights: Tensor) -> Self:
        """The past once steps have attended with `weights` (..., T, S)."""
        return self._replace(
            weights=weights[..., -1, :], total=self.total + weights.sum(-2), step=self.step + weights.shape[-2]
        )

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, for beam search."""
        return self._replace(weights=self.weights.index_select(0, index), total=self.total.index_select(0, index))


class Choice(NamedTuple):
    """What training by REINFORCE needs to know of the positions that hard attention drew."""

    log_prob: Tensor  # (B, T) of the position drawn (with heads: their sum); 0 where none was drawn
    entropy: Tensor  # (B, T) in nats, of the distribution it was drawn from
    query: Tensor  # (B, T, Q)


class Attended(NamedTuple):
    """What an attention returns."""

    context: Tensor  # (B, T, M)
    weights: Tensor  # (B, T, S), with heads their mean
    past: Past  # after these steps
    choice: Choice | None = None  # of hard attention in training
