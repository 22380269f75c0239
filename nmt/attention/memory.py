"""What attention reads, and what earlier steps leave behind.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention.
"""

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor


class Memory(NamedTuple):
    """The encoded source sentences."""

    values: Tensor  # (B, S, M) encoder states
    keys: Tensor  # (B, S, A) their projection for the score, made once per sentence
    valid: Tensor  # (B, S) bool, True = may be attended to

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, for beam search."""
        return self._replace(
            values=self.values.index_select(0, index),
            keys=self.keys.index_select(0, index),
            valid=self.valid.index_select(0, index),
        )


class Past(NamedTuple):
    """What the steps so far have attended to."""

    weights: Tensor  # (B, S) of the previous step, zeros before the first
    total: Tensor  # (B, S) their running sum: coverage
    step: int  # index of the step to come

    @classmethod
    def start(cls, valid: Tensor) -> Self:
        """The past before the first step."""
        nothing = torch.zeros(valid.shape, device=valid.device)
        return cls(nothing, nothing, 0)

    def after(self, weights: Tensor) -> Self:
        """The past once a step has attended with `weights` (B, S)."""
        return self._replace(weights=weights, total=self.total + weights, step=self.step + 1)

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, for beam search."""
        return self._replace(weights=self.weights.index_select(0, index), total=self.total.index_select(0, index))


class Score(Protocol):
    """How well a query fits each key."""

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence."""
        ...

    def __call__(self, query: Tensor, keys: Tensor) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked."""
        ...


class Window(Protocol):
    """Which of the valid positions a query may attend to."""

    def __call__(self, query: Tensor, valid: Tensor, past: Past) -> Tensor:
        """(B, T, Q), (B, S) -> bool (B, T, S) or (B, 1, S), True = keep."""
        ...


class Normalizer(Protocol):
    """From energies to weights."""

    def __call__(self, energies: Tensor, keep: Tensor, past: Past) -> Tensor:
        """(B, T, S), bool (B, T, S) -> (B, T, S): zero where not kept; rows sum to 1, or 0 if nothing is kept."""
        ...
