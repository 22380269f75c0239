"""The coverage penalty of Wu et al. 2016: source tokens that a translation has hardly attended to lower its score.

Shapes: A sentences, N rows of a step, S source positions.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = 1e-6  # attention that a source token has at least: sparse attentions leave out tokens, and log 0 is infinite


def coverage_penalty(attention: NDArray[np.float32], strength: float) -> float:
    """strength * sum_s log(min(a_s, 1)), at most 0, of the attention (S,) that each source token, </s> among them, has
    received in all steps (Wu et al. 2016, eq. 14, where `strength` is beta). Sums below 1e-6 count as 1e-6."""
    return strength * float(np.log(np.clip(attention, LEAST, 1.0)).sum(dtype=np.float64))


class Coverage:
    """The attention that the live hypotheses have given to each source token so far."""

    def __init__(self, strength: float, lengths: Sequence[int]) -> None:
        """lengths: the source tokens of each sentence. Raises ValueError for a negative strength."""
        if not strength >= 0:
            raise ValueError(f"the coverage penalty is {strength}, but must be at least 0")
        self._strength, self._lengths = strength, list(lengths)
        self._sums: Tensor | None = None

    def repeated(self, n: int) -> Self:
        """Each sentence n times."""
        return type(self)(self._strength, [length for length in self._lengths for _ in range(n)])

    def add(self, weights: Tensor | None) -> None:
        """The attention (N, S) of the current step. Raises ValueError for a model without attention."""
        if weights is None:
            raise ValueError("a coverage penalty needs a model with attention")
        self._sums = weights.float() if self._sums is None else self._sums + weights

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """The current row that each new row extends, and the token that extends it."""
        assert self._sums is not None
        self._sums = self._sums[torch.tensor(parents).to(self._sums.device, non_blocking=True)]

    def penalties(self, sentences: Sequence[int], rows: Sequence[int]) -> list[float]:
        """Of hypotheses that end in these rows, which belong to these sentences."""
        assert self._sums is not None
        sums = self._sums[torch.tensor(rows).to(self._sums.device)].cpu().numpy()
        # Padding is cut off, and each sum is made alone: other sentences of the batch do not change a bit.
        own = zip(sums, (self._lengths[sentence] for sentence in sentences), strict=True)
        return [coverage_penalty(row[:length], self._strength) for row, length in own]
