"""The parts an attention is put together from, and what is asked of each.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention.
"""

from typing import NamedTuple

from torch import Tensor, nn

from nmt.attention.memory import Past


class Score(nn.Module):
    """How well a query fits each key. A score knows no mask."""

    reads_past = False  # does `adjust` do anything?

    def within_reach(self, valid: Tensor) -> Tensor:
        """bool (B, S) -> bool (B, S): of the valid positions those that the score has an energy for."""
        return valid

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence."""
        return memory

    def adjust(self, keys: Tensor, past: Past) -> Tensor:
        """(B, S, A) -> (B, S, A), at every step: what the steps so far change in the keys."""
        return keys

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked."""
        raise NotImplementedError


class Coverage(nn.Module):
    """What the steps so far have covered, for the keys of any score."""

    def forward(self, keys: Tensor, past: Past) -> Tensor:
        """(B, S, A) -> (B, S, A), at every step."""
        raise NotImplementedError


class Window(nn.Module):
    """Which of the valid positions a query may attend to: all of them, or those within `reach` of a centre."""

    reach: int | None = None  # D; None: all
    reads_step = False  # does the centre depend on the number of the step?

    def centre(self, query: Tensor, valid: Tensor, past: Past) -> Tensor:
        """(B, T, Q), bool (B, S) -> (B, T), positions counted from 0, not always whole."""
        raise NotImplementedError

    def holds(self, offsets: Tensor) -> Tensor:
        """(B, T, W) distances from the centre -> bool, within reach."""
        assert self.reach is not None
        return offsets.abs() <= self.reach

    def falloff(self, offsets: Tensor) -> Tensor | None:
        """(B, T, W) distances from the centre -> factors of the weights after normalisation, or None."""
        return None


class Normalized(NamedTuple):
    """Weights, and for hard attention in training how the position was drawn."""

    weights: Tensor  # (B, T, W), zero where not kept
    log_prob: Tensor | None = None  # (B, T)
    entropy: Tensor | None = None  # (B, T), nats


class Normalizer(nn.Module):
    """From energies to weights."""

    reads_past = False

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights, float32 or wider, zero where not kept; a row sums to 1, or to 0
        if nothing is kept (and to less than 1 where monotonic reading may pass the end)."""
        raise NotImplementedError
