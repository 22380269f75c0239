"""BLEU, chrF and TER from sums of sentence statistics, for many sums at once.

The last axis of `sums` holds sacreBLEU's statistics of a set of sentences, added up, and the result has the axes before
it: (..., k) -> (...). The scores equal sacreBLEU's (Post 2018).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Formula = Callable[[Floats], Floats]

BETA = 2  # of chrF: recall counts as much as BETA**2 precisions


def bleu(sums: Floats, effective_order: bool = False) -> Floats:
    """(..., 10): lengths of output and reference, matches and n-grams of orders 1 to 4 -> (...), 0 to 100.

    Papineni et al. 2002, with exponential smoothing: the k-th order without a match counts 1 / 2^k matches. Without
    any n-gram of an order the score is 0; `effective_order` leaves such orders out.
    """
    length, reference, matches, totals = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:10]
    present = totals > 0
    missed = present & (matches == 0)
    smoothed = np.where(missed, 0.5 ** np.cumsum(missed, -1), matches)
    logs = np.log(np.where(present, smoothed, 1.0) / np.where(present, totals, 1.0))
    orders = np.maximum(present.sum(-1), 1) if effective_order else 4
    penalty = np.minimum(1 - reference / np.where(length > 0, length, 1.0), 0.0)
    score = 100 * np.exp(penalty + logs.sum(-1) / orders)
    nothing = (matches.sum(-1) == 0) | (length == 0) | (not effective_order and ~present.all(-1))
    return np.where(nothing, 0.0, score)


def chrf(sums: Floats) -> Floats:
    """(..., 18): n-grams of the output, of the reference, and matches, for orders 1 to 6 -> (...), 0 to 100.

    Popović 2015: the F score of precision and recall, each a mean over the orders that both texts have.
    """
    output, reference, matches = (sums[..., part::3] for part in range(3))
    present = (output > 0) & (reference > 0)
    orders = np.maximum(present.sum(-1), 1)
    precision, recall = (
        np.where(present, matches / np.where(present, counts, 1.0), 0.0).sum(-1) / orders
        for counts in (output, reference)
    )
    weighted = BETA**2 * precision + recall
    score: Floats = 100 * (1 + BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1.0)
    return score


def ter(sums: Floats) -> Floats:
    """(..., 2): edits and length of the reference -> (...), in percent (Snover et al. 2006)."""
    edits, length = sums[..., 0], sums[..., 1]
    return 100 * np.where(length > 0, edits / np.where(length > 0, length, 1.0), edits > 0)


def mean(sums: Floats) -> Floats:
    """(..., 2): sum of sentence scores and number of sentences -> (...)."""
    return np.asarray(sums[..., 0] / sums[..., 1])


FORMULAS: dict[str, Formula] = {"bleu": bleu, "chrf": chrf, "ter": ter, "comet": mean}
