"""The parts of an attention, and the interface of each.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention, F features.
"""

from typing import NamedTuple

from torch import Tensor, nn

from nmt.attention.memory import Past


class KeyUpdate(NamedTuple):
    """What a step adds to the keys: k'_s = k_s + P f_s. Stored as two factors, so that no step needs keys (B, S, A) of
    its own."""

    features: Tensor  # (B, S, F)
    projection: Tensor  # (A, F), the same at every step


class Score(nn.Module):
    """How well a query fits each key. A score knows no mask."""

    reads_past = False  # does it have key features, or a state that moves?

    def within_reach(self, valid: Tensor) -> Tensor:
        """bool (B, S) -> bool (B, S): the valid positions for which the score is defined."""
        return valid

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence."""
        return memory

    def key_projection(self) -> Tensor | None:
        """P (A, F) of the KeyUpdate, once per batch."""
        return None

    def key_features(self, past: Past) -> Tensor | None:
        """f (B, S, F) of the KeyUpdate, at every step."""
        return None

    def move(self, query: Tensor, past: Past) -> Past:
        """The query (B, 1, Q) of a step -> the past with what the score itself carries along moved to this step."""
        return past

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked; `update` is added to the keys."""
        raise NotImplementedError


class Coverage(nn.Module):
    """Makes the keys of any score depend on what earlier steps attended to."""

    def keys(self, keys: Tensor) -> Tensor:
        """(B, S, A) -> (B, S, A), once per source sentence."""
        return keys

    def key_projection(self) -> Tensor:
        """P (A, F) of the KeyUpdate, once per batch."""
        raise NotImplementedError

    def key_features(self, past: Past) -> Tensor:
        """f (B, S, F) of the KeyUpdate, at every step."""
        raise NotImplementedError


class Window(nn.Module):
    """Which of the valid positions a query may attend to: all of them, or those within `reach` of a centre."""

    reach: int | None = None  # D; None: all

    def centre(self, query: Tensor, valid: Tensor, steps: range) -> Tensor:
        """(B, T, Q), bool (B, S), their T steps from 0 (or one step for all) -> centres (B, T), positions from 0, not
        necessarily integers."""
        raise NotImplementedError

    def holds(self, offsets: Tensor) -> Tensor:
        """(B, T, W) distances from the centre -> bool, within reach."""
        assert self.reach is not None
        return offsets.abs() <= self.reach

    def falloff(self, offsets: Tensor) -> Tensor | None:
        """(B, T, W) distances from the centre -> factors of the weights after normalisation, or None."""
        return None


class Normalized(NamedTuple):
    """A distribution over positions."""

    weights: Tensor  # (B, T, W), zero where not kept
    log_weights: Tensor | None = None  # (B, T, W), -inf where not kept; exact even where the weight underflows


class Normalizer(nn.Module):
    """Turns energies into weights."""

    reads_past = False
    stops = False  # does it read on from where the previous step stopped?
    takes_masked = False  # does it also take energies that are masked already, with None for `keep`?

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights, float32 or wider, zero where not kept; a row sums to 1, or to 0
        if `keep` has no position (to less than 1 if monotonic attention may pass the end)."""
        raise NotImplementedError


class Aligned(NamedTuple):
    """The weights of the context; of a sampled position also how it was sampled."""

    weights: Tensor  # (B, T, W)
    log_prob: Tensor | None = None  # (B, T) of the sampled position
    entropy: Tensor | None = None  # (B, T) of the distribution, in nats


class Alignment(nn.Module):
    """Turns the distribution over positions into the weights of the context."""

    needs_distribution = True  # must the weights sum to 1, also in a window that scales them?

    def forward(self, distribution: Normalized) -> Aligned:
        """(B, T, W), a row of zeros where no position is kept -> weights (B, T, W)."""
        raise NotImplementedError
