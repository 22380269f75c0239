"""Statistics of attention weights over many sentences: entropy, weight on </s>, positions of hard choices.

Shapes: S source positions, T target positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.data.word_alignment import Weights


class AttentionStatistics(NamedTuple):
    """Means over the target tokens of several sentences.

    Rows are normalised; rows of zeros (monotonic attention past the end) are left out.
    """

    entropy: float  # nats; 0 for one position, log S for uniform weights
    on_end: float  # share of the weight on the source's last position, </s>


def attention_statistics(alignments: Sequence[Weights]) -> AttentionStatistics:
    """Average over the attention (T, S) of one or more sentences; of multi-head attention give the mean over heads."""
    entropies, on_end = [np.zeros(0)], [np.zeros(0)]
    for weights in alignments:
        rows = weights[weights.any(1)]
        shares = rows / rows.sum(1, keepdims=True)
        entropies.append(-(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1))
        on_end.append(shares[:, -1])
    if not sum(map(len, on_end)):
        return AttentionStatistics(0.0, 0.0)
    return AttentionStatistics(float(np.concatenate(entropies).mean()), float(np.concatenate(on_end).mean()))


class Positions(NamedTuple):
    """The source positions of an attention that attends to one position per step."""

    positions: NDArray[np.int64]  # from 0; steps with zero weights are left out
    jumps: NDArray[np.int64]  # from each step to the next; negative is backwards


def chosen_positions(alignments: Sequence[Weights]) -> Positions | None:
    """Find the positions that the attention (T, S) of sentences chose; None unless all weights are 0 or 1."""
    if not all(((weights == 0) | (weights == 1)).all() for weights in alignments):
        return None
    paths = [weights.argmax(1)[weights.any(1)] for weights in alignments]
    empty = np.zeros(0, np.int64)
    return Positions(np.concatenate([empty, *paths]), np.concatenate([empty, *map(np.diff, paths)]))
