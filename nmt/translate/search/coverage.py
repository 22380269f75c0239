"""Coverage in the score of a hypothesis: a penalty for source tokens that received little attention (Wu et al. 2016),
or a length normalisation, by which attention to source tokens raises the score (Li et al. 2018).

Shapes: A sentences, N rows of a step, S source positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class CoverageScore:
    """strength * sum_s log(min(max(a_s, floor), cap)) of the attention a_s that each source token, </s> among them, has
    received in all steps.

    A cap of 1 is the penalty of Wu et al. 2016, eq. 14, where strength is beta: it is never above 0, and a longer
    translation gains nothing once all tokens are covered. With a cap that no sum reaches, it is the coverage score of
    Li et al. 2018, where the floor is beta: it grows with the length, the less so the more often the same tokens are
    attended to.

    Raises ValueError for a negative strength, or unless 0 < floor < cap.
    """

    strength: float
    floor: float = 1e-6
    cap: float = 1.0

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ValueError(f"the coverage's strength is {self.strength}, but must be at least 0")
        if not 0 < self.floor < self.cap:
            raise ValueError(f"the coverage's floor is {self.floor}, but must be above 0 and below the cap, {self.cap}")

    def __call__(self, attention: NDArray[np.float32]) -> float:
        """The score of a hypothesis whose source tokens received the attention sums (S,)."""
        return self.strength * float(np.log(np.clip(attention, self.floor, self.cap)).sum(dtype=np.float64))

    def upper_bound(self, length: int) -> float:
        """No hypothesis of a source of `length` tokens scores above this."""
        return self.strength * length * math.log(self.cap)


class Coverage:
    """The attention that the live hypotheses have given to each source token so far."""

    def __init__(self, score: CoverageScore, lengths: Sequence[int]) -> None:
        """lengths: the source tokens of each sentence."""
        self._score, self._lengths = score, list(lengths)
        self._sums: Tensor | None = None

    def repeated(self, n: int) -> "Coverage":
        """Each sentence n times."""
        return Coverage(self._score, [length for length in self._lengths for _ in range(n)])

    def add(self, weights: Tensor | None) -> None:
        """The attention (N, S) of the current step. Raises ValueError for a model without attention."""
        if weights is None:
            raise ValueError("a coverage score needs a model with attention")
        self._sums = weights.float() if self._sums is None else self._sums + weights

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Follow the search by one step: new row i extends row parents[i] by tokens[i]."""
        assert self._sums is not None
        self._sums = self._sums[torch.tensor(parents).to(self._sums.device, non_blocking=True)]

    def scores(self, sentences: Sequence[int], rows: Sequence[int]) -> list[float]:
        """The scores of hypotheses that end in these rows of these sentences."""
        assert self._sums is not None
        sums = self._sums[torch.tensor(rows).to(self._sums.device)].cpu().numpy()
        # Padding is cut off, and each sum is made alone: other sentences of the batch do not change a bit.
        own = zip(sums, (self._lengths[sentence] for sentence in sentences), strict=True)
        return [self._score(row[:length]) for row, length in own]

    def upper_bound(self, sentence: int) -> float:
        """No hypothesis of this sentence scores above this."""
        return self._score.upper_bound(self._lengths[sentence])
