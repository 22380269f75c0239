"""The difference between two systems, with the variance between seeds and the variance between sentences.

Seed j of system A scores a_j on the test set, and seed j of B b_j. The difference of the means has the t statistic

    D = mean(a) - mean(b),    Var(D) = s_a^2 / n_a + s_b^2 / n_b + v,    t = D / sqrt(Var(D)),

where s^2 is the variance between a system's n scores, and v is the variance of D over bootstrap samples of the
sentences, with the seeds as they are. The degrees of freedom are Satterthwaite's (1946). v contains the luck that each
seed has with sentences, which s^2 contains as well: Var(D) is a little too large. With few seeds the estimates s^2 are
so uncertain that the test needs this to hold its level (docs/comparison.md has the figures of a simulation).

A system with one seed takes s^2 from the other system. With one seed each nothing is known of the variance between
seeds: Var(D) = v, and the paired tests of nmt.evaluate.significance decide.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from nmt.evaluate.formulas import Floats
from nmt.evaluate.student import t_p_value, t_quantile

POWER = 0.8
MAX_SEEDS = 1000  # more than anybody trains
KNOWN = 1e6  # degrees of freedom of a variance that is taken as known


@dataclass(frozen=True)
class Effect:
    """A mean over seeds or a difference of two means."""

    value: float
    variance: float  # the square of the standard error
    freedom: float  # degrees of freedom
    shared: float  # the part of the variance that more seeds do not reduce
    of_seed: tuple[float, ...] = ()  # the rest for one seed of each system; empty if nothing is known of it

    @classmethod
    def of(
        cls,
        value: float,
        parts: Sequence[tuple[float, float]],
        shared: float = 0.0,
        of_seed: tuple[float, ...] = (),
    ) -> Self:
        """From the parts of the variance, each with the degrees of freedom of its estimate (Satterthwaite 1946)."""
        variance = sum(part for part, _ in parts)
        share = sum((part / variance) ** 2 / freedom for part, freedom in parts) if variance else 1.0
        return cls(value, variance, 1 / share, shared, of_seed)

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        return t_quantile(0.975, self.freedom) * math.sqrt(self.variance)

    @property
    def p_value(self) -> float:
        """The probability of a difference at least as large if the systems were equal; 1 without any variance."""
        return t_p_value(self.value / math.sqrt(self.variance), self.freedom) if self.variance else 1.0

    def detectable(self, level: float) -> float:
        """The difference that is significant at this level with a probability of about 80 %."""
        errors = t_quantile(1 - level / 2, self.freedom) + t_quantile(POWER, self.freedom)
        return errors * math.sqrt(self.variance)

    def seeds_needed(self, level: float) -> float | None:
        """The seeds of each system with which a true difference of this value is significant with about 80 %.

        Infinite if MAX_SEEDS are too few: the test set is too small. None if nothing is known of the variance between
        seeds.
        """
        if not self.of_seed:
            return None
        counts = range(2, MAX_SEEDS + 1)
        index = bisect_left(counts, True, key=lambda count: self._with(count).detectable(level) <= abs(self.value))
        return counts[index] if index < len(counts) else math.inf

    def _with(self, seeds: int) -> "Effect":
        """What this many seeds of each system would give."""
        return Effect.of(self.value, [(self.shared, KNOWN), *((part / seeds, seeds - 1) for part in self.of_seed)])


def difference(a: Sequence[float], b: Sequence[float], covariance: Floats, sentences: int) -> Effect:
    """A's mean minus B's, of the scores of n_a and n_b seeds on this many sentences.

    covariance: (n_a + n_b, n_a + n_b), of A's scores and then B's over bootstrap samples of the sentences.
    """
    counts, value = (len(a), len(b)), float(np.mean(a) - np.mean(b))
    signs = np.repeat([1 / len(a), -1 / len(b)], counts)
    of_sentences = max(float(signs @ covariance @ signs), 0.0), max(sentences - 1, 1)
    if counts == (1, 1):
        return Effect.of(value, [of_sentences], of_sentences[0])
    blocks = covariance[: len(a), : len(a)], covariance[len(a) :, len(a) :]
    known = [(_variance(x), _luck(block)) for x, block in zip((a, b), blocks, strict=True) if len(x) > 1]
    between, luck = zip(known[0], known[-1], strict=True)  # of A and B, or of the one that has several seeds
    if 1 in counts:
        parts = [(between[0] * (1 / counts[0] + 1 / counts[1]), max(counts) - 1)]
    else:
        parts = [(variance / count, count - 1) for variance, count in zip(between, counts, strict=True)]
    shared = max(of_sentences[0] - sum(part / count for part, count in zip(luck, counts, strict=True)), 0.0)
    return Effect.of(value, [*parts, of_sentences], shared, (between[0] + luck[0], between[1] + luck[1]))


def mean_of_seeds(scores: Sequence[float], covariance: Floats, sentences: int) -> Effect:
    """The mean of the scores of two or more seeds. covariance: (n, n), of them over bootstrap samples."""
    count = len(scores)
    parts = [(_variance(scores) / count, count - 1), (float(covariance.mean()), max(sentences - 1, 1))]
    return Effect.of(float(np.mean(scores)), parts)


def _variance(scores: Sequence[float]) -> float:
    return float(np.var(scores, ddof=1))


def _luck(block: Floats) -> float:
    """The variance over sentences (n, n) that a seed has alone: what the covariance with other seeds leaves."""
    own, count = float(np.trace(block)) / len(block), len(block)
    return max(own - (float(block.sum()) - own * count) / (count * (count - 1)), 0.0)
