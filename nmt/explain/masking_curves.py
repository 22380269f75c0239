"""How well weights over source tokens explain an output token: rank correlation, masking curves, their means.

Shapes: T target positions, S source positions, K = MASKS.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

MASKS = 5  # source tokens that a masking curve masks
Z_95 = 1.96  # half the width of a normal distribution's 95 % interval, in standard deviations


def kendall_tau(first: Array, second: Array) -> Array:
    """Kendall's tau-b of each row: (T, S), (T, S) -> (T,); NaN where all values of a row are equal.

    (concordant - discordant) / sqrt((pairs - ties in first) (pairs - ties in second))   (Kendall 1945).
    """
    agreement, untied_first, untied_second = np.zeros((3, len(first)))
    for lag in range(1, first.shape[1]):  # all pairs of positions at this distance
        signs = np.sign(first[:, lag:] - first[:, :-lag])
        other_signs = np.sign(second[:, lag:] - second[:, :-lag])
        agreement += (signs * other_signs).sum(1)
        untied_first += np.abs(signs).sum(1)
        untied_second += np.abs(other_signs).sum(1)
    untied = np.sqrt(untied_first * untied_second)
    return np.where(untied > 0, agreement / np.where(untied > 0, untied, 1.0), np.nan)


def combined(first: Array, second: Array) -> Array:
    """The normalised product of two distributions in each row: (T, S), (T, S) -> (T, S); zeros without overlap."""
    product = first.astype(np.float64) * second
    totals = product.sum(1, keepdims=True)
    return product / np.where(totals > 0, totals, 1.0)


def masking_order(weights: Array, random: Array) -> NDArray[np.int64]:
    """Source positions by falling weight, equal ones by rising `random`: (T, S), (T, S) -> (T, min(K, S))."""
    return np.lexsort((random, -weights), axis=-1)[:, :MASKS]


def masking_curves(masked: Array, unmasked: Array) -> Array:
    """What is left of a token's probability: log-probabilities (T, n) with 1 to n <= K tokens masked, (T,) with none
    -> min(1, p(y_t | masked) / p(y_t)) (T, K + 1), from 0 masks on. A source of n < K tokens keeps its last value.

    The ratio is cut at 1: an improbable token can become a thousand times as probable, which would outweigh all others.
    """
    kept = np.exp(np.minimum(masked - unmasked[:, None], 0.0))
    curves = np.concatenate([np.ones((len(kept), 1)), kept], axis=1)
    return np.pad(curves, ((0, 0), (0, MASKS + 1 - curves.shape[1])), mode="edge")


def areas(curves: Array) -> Array:
    """The area under each curve by the trapezoidal rule, divided by K: (T, K + 1) -> (T,), from 1 / (2 K) to 1."""
    area: Array = (curves[:, 1:] + curves[:, :-1]).sum(1) / (2 * (curves.shape[1] - 1))
    return area


class Mean(NamedTuple):
    """A mean over the tokens of several sentences."""

    mean: float
    interval: float | None  # half the width of its 95 % interval; None for one sentence


def mean_over_tokens(sentences: Sequence[Array]) -> Mean | None:
    """The mean of all values but NaN, each array from one sentence; None without any.

    Tokens of one sentence depend on each other, so sentences are the units of the interval: the variance of a ratio of
    two sums, that of the values and that of their number (Cochran 1977, section 6.3).
    """
    known = [values[~np.isnan(values)] for values in sentences]
    known = [values for values in known if len(values)]
    if not known:
        return None
    sums, counts = (np.array([measure(values) for values in known], float) for measure in (np.sum, len))
    mean, n = float(sums.sum() / counts.sum()), len(known)
    if n == 1:
        return Mean(mean, None)
    variance = n / (n - 1) * float(((sums - mean * counts) ** 2).sum()) / counts.sum() ** 2
    return Mean(mean, Z_95 * float(np.sqrt(variance)))
