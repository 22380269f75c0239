"""Statistics of attention weights over many sentences: entropy, weight on </s>.

Shapes: S source positions, T target positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
