"""What the page of nmt-serve asks of an attention: to replace its weights, and to show what it did.

Shapes: B batch, L steered steps, T target positions, S source positions, N heads.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Steering(NamedTuple):
    """Weights that replace the computed ones at some of the first L steps."""

    weights: Tensor  # (B, L, S)
    steered: Tensor  # bool (B, L), True where they replace the computed weights

    def replace(self, steps: range, weights: Tensor) -> Tensor:
        """Replace the rows of steered steps: (B, T, S) of T steps, or of T hypotheses at one step -> (B, T, S)."""
        if steps.start >= self.steered.shape[1]:
            return weights
        within = slice(steps.start, steps.stop)
        rows, steered = self.weights[:, within].to(weights.dtype), self.steered[:, within, None]
        if len(steps) == 1:
            return torch.where(steered, rows, weights)
        replaced = torch.where(steered, rows, weights[:, : rows.shape[1]])
        return torch.cat([replaced, weights[:, rows.shape[1] :]], dim=1)

    def replace_stops(self, steps: range, log_stops: Tensor) -> Tensor:
        """Replace log-probabilities (B, T, S) of where monotonic reading stops: steered, it stops at the last position
        with weight."""
        attended = self.weights > 0
        last = attended & (attended.flip(-1).cumsum(-1).flip(-1) == 1)
        return Steering(last.to(log_stops.dtype).log(), self.steered).replace(steps, log_stops)

    def select(self, index: Tensor) -> Self:
        """Select rows of the batch, int64 (N,)."""
        return self._replace(weights=self.weights.index_select(0, index), steered=self.steered.index_select(0, index))

    def repeat(self, heads: int) -> Self:
        """Repeat each row of the batch for `heads` heads."""
        return type(self)(*(part.repeat_interleave(heads, dim=0) for part in self))


class Detail(NamedTuple):
    """What an attention did beside the mean weights of its heads."""

    heads: Tensor  # (B, N, T, S), the weights of each head
    centres: Tensor | None  # (B, N, T) of a local window, from 0
    stops: Tensor | None  # int64 (B, N, T): where monotonic reading stopped, from 0; -1: it passed the end

    @classmethod
    def of_one_head(cls, weights: Tensor, centres: Tensor | None, log_stops: Tensor | None) -> Self:
        """Describe one head: (B, T, S), (B, T) or None, (B, T, S) or None."""
        stops = None
        if log_stops is not None:
            stops = torch.where((log_stops > -torch.inf).any(-1), log_stops.argmax(-1), -1)[:, None]
        return cls(weights[:, None], None if centres is None else centres[:, None], stops)

    @classmethod
    def join(cls, steps: Sequence[Self]) -> Self:
        """Join successive steps along T."""
        heads, *others = (None if parts[0] is None else torch.cat(parts, dim=2) for parts in zip(*steps, strict=True))
        assert heads is not None
        return cls(heads, *others)

    def by_head(self, heads: int) -> Self:
        """Group the rows of a batch by sentence: (B N, 1, ...) -> (B, N, ...)."""
        T, S = self.heads.shape[2:]
        return self._replace(
            heads=self.heads.view(-1, heads, T, S),
            centres=None if self.centres is None else self.centres.view(-1, heads, T),
            stops=None if self.stops is None else self.stops.view(-1, heads, T),
        )
