"""What attention weights look like, in numbers.

T target positions, S source positions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.floating[Any]]


class AttentionStatistics(NamedTuple):
    """Means over all rows, that is target tokens, of several sentences. A row counts by its shares, one without any
    weight (monotonic attention past the end) not at all. Of heads the mean weights are looked at."""

    entropy: float  # nats; 0: one position, log S: all alike
    on_end: float  # share of the weight on the source's last position, </s>


class Positions(NamedTuple):
    """Where an attention stood that takes one position at a time."""

    positions: NDArray[np.int64]  # from 0, of all rows that took one
    jumps: NDArray[np.int64]  # from each row's position to the next row's: negative is backwards


def attention_statistics(alignments: Sequence[Weights]) -> AttentionStatistics:
    """Of (T, S) weights of one sentence each; at least one."""
    entropies, on_end = [np.zeros(0)], [np.zeros(0)]
    for weights in alignments:
        rows = weights[weights.any(1)]
        shares = rows / rows.sum(1, keepdims=True)
        entropies.append(-(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1))
        on_end.append(shares[:, -1])
    if not sum(map(len, on_end)):
        return AttentionStatistics(0.0, 0.0)
    return AttentionStatistics(float(np.concatenate(entropies).mean()), float(np.concatenate(on_end).mean()))


def chosen_positions(alignments: Sequence[Weights]) -> Positions | None:
    """Of (T, S) weights of one sentence each; None unless all weights are 0 or 1."""
    if not all(((weights == 0) | (weights == 1)).all() for weights in alignments):
        return None
    paths = [weights.argmax(1)[weights.any(1)] for weights in alignments]
    nothing = np.zeros(0, np.int64)
    return Positions(np.concatenate([nothing, *paths]), np.concatenate([nothing, *(np.diff(path) for path in paths)]))
