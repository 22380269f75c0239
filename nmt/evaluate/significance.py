"""Tests differences between outputs and between systems, from the statistics of single sentences.

An output has an array (N, k) for each metric, the k statistics of N sentences (nmt.evaluate.metrics). The sums over
the sentences of R resamplings are then a product of matrices (R, N) and (N, k).

- Two outputs: paired bootstrap resampling (Koehn 2004) and paired approximate randomisation (Riezler and Maxwell 2005),
  with the results of `sacrebleu --paired-bs` and `--paired-ar`.
- Two systems with several outputs each, one for each seed: a t test that includes the variance between seeds and the
  variance between sentences (`Effect`), and stratified approximate randomisation (Clark et al. 2011), which says
  nothing about other seeds.
- Many comparisons: Holm's correction (1979), and groups of systems by letters (Piepho 2004).

The difference D of the means of n_a scores a and n_b scores b has the t statistic

    D = mean(a) - mean(b),    Var(D) = r_a^2 / n_a + r_b^2 / n_b + w,    t = D / sqrt(Var(D)),

where r_a^2 and r_b^2 are the variances between the seeds of A and of B (`SeedVariance`), and w comes from the choice of
the sentences, which all seeds of a system share. docs/comparison.md explains the test, and docs/results/notes.md has
the figures of simulations. If every system has one seed, Var(D) is the variance over bootstrap samples of the
sentences, and the two paired tests decide.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from string import ascii_letters
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nmt.evaluate.metrics import METRICS, Counts, corpus_score
from nmt.translate.similarity import Floats

Output = Mapping[str, Counts]  # statistics (N, k) of an output, by metric
CHUNK_TRIALS = 500  # bootstrap samples or trials in a chunk, which bounds the memory of a product
ROUNDING = 1e-9  # score differences up to this size count as 0, because the order of sums may cause them
POWER = 0.8  # probability with which a test finds the difference that it is designed for
MAX_SEEDS = 1000  # largest number of seeds that `Effect.seeds_needed` tries
NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(100)  # quadrature on [-1, 1]
UNEQUAL = 4  # a system's variance between seeds stands out if it is so many times the mean variance of the others
TAIL = 12  # standard deviations up to which a density is integrated; its tail beyond holds less than 1e-30
BISECTIONS = 45  # number of times that `t_quantile` halves its interval


class Resampling:
    """Resamples the sentences of a test set, to score outputs and to test their differences. All outputs share the same
    draws, which are also sacreBLEU's."""

    def __init__(self, sentences: int, samples: int, trials: int) -> None:
        """Draw the random numbers of all tests, with the seed in the environment variable SACREBLEU_SEED: `samples` (R)
        bootstrap samples of N `sentences`, and `trials` randomisations."""
        self.samples, self.trials = samples, trials
        drawn = _generator().choice(sentences, size=(samples, sentences), replace=True)
        # (R, N): how often each bootstrap sample contains each sentence.
        self._weights = np.stack([np.bincount(row, minlength=sentences) for row in drawn]).astype(np.uint16)
        # (trials, N): whether each trial exchanges the two outputs of each sentence.
        self._swaps = _generator().integers(2, size=(trials, sentences), dtype=bool)

    def bootstrap(self, outputs: Sequence[Counts], metric: str) -> Floats:
        """Score M outputs (N, k) on the bootstrap samples: (M, R)."""
        beside = _beside(outputs)
        sums = (chunk @ beside for chunk in _chunks(self._weights))
        return np.concatenate([METRICS[metric].formula(part.reshape(len(part), len(outputs), -1)) for part in sums]).T

    def paired_randomisation(self, baseline: Output, output: Output) -> dict[str, float]:
        """Test the difference between two outputs by paired approximate randomisation. Returns a p value per metric."""
        one, other = (_beside(list(side.values())) for side in (baseline, output))
        total, edges = one.sum(0) + other.sum(0), np.cumsum([0, *(counts.shape[1] for counts in output.values())])
        differences: dict[str, list[Floats]] = {name: [] for name in output}
        for chunk in _chunks(self._swaps):
            swapped = other.sum(0) + chunk @ (one - other)
            for name, (start, end) in zip(output, pairwise(edges), strict=True):
                sides = (METRICS[name].formula(sums[:, start:end]) for sums in (swapped, total - swapped))
                differences[name].append(np.abs(np.subtract(*sides)))
        return {
            name: _p_value(np.concatenate(parts), corpus_score(output[name], name) - corpus_score(baseline[name], name))
            for name, parts in differences.items()
        }

    def stratified_randomisation(
        self,
        systems: Sequence[Sequence[Counts]],
        pairs: Sequence[tuple[int, int]],
        metric: str,
        progress: Callable[[int], object] = lambda _: None,
    ) -> list[float]:
        """Test the difference between each pair of systems by stratified approximate randomisation; return p values.

        systems: the outputs (N, k) of each system; pairs: indices of two systems each; progress: receives the number of
        pairs done. For every sentence, a trial pairs the outputs of the two systems at random, and exchanges each pair
        with probability 1/2 (Clark et al. 2011, and their program MultEval). If one system has more outputs than the
        other, those without a partner stay. A system's score is computed from the sums over all its outputs. The test
        says nothing about other seeds.
        """
        formula = METRICS[metric].formula
        stacks = [np.stack([np.asarray(counts, float) for counts in outputs]) for outputs in systems]
        totals = [stack.sum((0, 1)) for stack in stacks]
        observed = {(a, b): float(formula(totals[a]) - formula(totals[b])) for a, b in pairs}
        p_values: dict[tuple[int, int], float] = {}
        for shape in dict.fromkeys((len(stacks[a]), len(stacks[b])) for a, b in pairs):
            members = [(a, b) for a, b in pairs if (len(stacks[a]), len(stacks[b])) == shape]
            differences: dict[tuple[int, int], list[Floats]] = {pair: [] for pair in members}
            sides = [sorted({pair[side] for pair in members}) for side in (0, 1)]
            for kept, given in self._exchange(stacks, sides, shape):
                for a, b in members:
                    first = kept[a] + given[b]
                    differences[a, b].append(np.abs(formula(first) - formula(totals[a] + totals[b] - first)))
            p_values |= {pair: _p_value(np.concatenate(parts), observed[pair]) for pair, parts in differences.items()}
            progress(len(members))
        return [p_values[pair] for pair in pairs]

    def _exchange(
        self, stacks: Sequence[Floats], sides: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Iterator[list[dict[int, Floats]]]:
        """Exchange outputs at random, and yield sums over the outputs for one chunk of trials after another.

        sides: the systems that are first in a pair, and the systems that are second; shape: the number of outputs of a
        first system and of a second system. A chunk has a dict for each side, from system to sums (trials, k). A first
        system has the sums over the outputs that it keeps, a second system those over the outputs that it gives away.
        Added together, these are the sums over the first system's outputs after the exchange. For every sentence, the
        number of exchanged outputs is binomial, and each output of a system is equally likely to be exchanged.
        """
        rng = _generator()
        beside = [
            [_beside([stacks[system][run] for system in side]) for run in range(n)]
            for side, n in zip(sides, shape, strict=True)
        ]
        for start in range(0, self.trials, CHUNK_TRIALS):
            drawn = min(CHUNK_TRIALS, self.trials - start), stacks[0].shape[1]
            exchanged = rng.binomial(min(shape), 0.5, drawn).astype(np.float32)
            sums_by_side: list[dict[int, Floats]] = []
            for side, runs, chosen in zip(sides, beside, (shape[0] - exchanged, exchanged), strict=True):
                missing, sums = chosen.copy(), np.zeros((len(chosen), runs[0].shape[1]))
                for left, run in zip(range(len(runs), 0, -1), runs, strict=True):
                    taken = rng.random(drawn, np.float32) * left < missing
                    missing -= taken
                    sums += taken.astype(float) @ run
                sums_by_side.append(dict(zip(side, np.split(sums, len(side), 1), strict=True)))
            yield sums_by_side


def half_width(scores: Floats) -> float:
    """Compute half the width of the 95 % interval of scores on R bootstrap samples, (R,), as sacreBLEU does."""
    low, ordered = len(scores) // 40, np.sort(scores)
    return float(ordered[len(scores) - low - 1] - ordered[low]) / 2


def paired_bootstrap(baseline: Floats, scores: Floats, observed: float) -> float:
    """Compute the p value of an observed difference from the scores of two outputs on the same bootstrap samples (R,).

    The differences on the samples lie around the observed one. Their mean is subtracted, as in sacreBLEU, so that they
    show how far chance alone moves a difference.
    """
    differences = np.abs(scores - baseline)
    return _p_value(differences - differences.mean(), observed)


def least_p(baseline: Counts, output: Counts) -> float:
    """Compute the smallest p value of an exact paired randomisation test of two outputs (N, k).

    On d sentences the statistics differ. Of the 2^d ways to exchange some of these sentences, two give a difference of
    the observed size: exchanging none and exchanging all.
    """
    differing = int((np.asarray(baseline) != np.asarray(output)).any(1).sum())
    return min(1.0, 2.0 ** (1 - differing))


def _p_value(differences: Floats, observed: float) -> float:
    """Compute the p value (1 + e) / (1 + R), where e of R resampled differences exceed the observed difference.

    An observed difference of 0 has p = 1.
    """
    if abs(observed) <= ROUNDING:
        return 1.0
    return float(1 + (differences > abs(observed) + ROUNDING).sum()) / (1 + len(differences))


def _beside(outputs: Sequence[Counts]) -> Floats:
    """Concatenate M outputs along their statistics, so that one product resamples all: M times (N, k) -> (N, M k)."""
    return np.concatenate([np.asarray(counts, float) for counts in outputs], 1)


def _chunks(draws: NDArray[np.uint16] | NDArray[np.bool_]) -> Iterator[Floats]:
    """Split draws (R, N) into chunks of floats."""
    return (draws[start : start + CHUNK_TRIALS].astype(float) for start in range(0, len(draws), CHUNK_TRIALS))


def _generator() -> np.random.Generator:
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    return np.random.default_rng(None if seed.lower() == "none" else int(seed))


@dataclass(frozen=True)
class SeedVariance:
    """What the scores of all compared systems say about the variance between seeds.

    Two seeds of a system differ because training differs, and because one of them happens to suit the chosen sentences
    better. Bootstrap samples of the sentences also show the size of the second part, a lower bound of the variance.
    """

    pooled: float  # mean variance between the scores of a system
    of_sentences: float  # part of the variance that the choice of the sentences causes
    freedom: int  # degrees of freedom of `pooled`; 0 if each system has one seed, so that nothing is known
    systems: int  # number of systems

    @classmethod
    def of(cls, scores: Sequence[Sequence[float]], covariances: Sequence[Floats]) -> Self:
        """Estimate the variance from the scores of each system's seeds.

        covariances: for each system (n, n), the covariance of its n scores over bootstrap samples of the sentences.
        """
        several = [index for index, values in enumerate(scores) if len(values) > 1]
        freedom = sum(len(scores[index]) - 1 for index in several)
        if not freedom:
            return cls(0.0, 0.0, 0, len(scores))
        pooled = sum((len(scores[index]) - 1) * _variance(scores[index]) for index in several) / freedom
        of_sentences = float(np.mean([_unshared_variance(covariances[index]) for index in several]))
        return cls(pooled, of_sentences, freedom, len(scores))

    def of_system(self, scores: Sequence[float]) -> float:
        """Return the variance between seeds of a system with these scores: the largest of the three estimates."""
        own = _variance(scores) if len(scores) > 1 else 0.0
        return max(own, self.pooled, self.of_sentences)

    def stands_out(self, scores: Sequence[float]) -> bool:
        """Check whether these scores of a system vary more than UNEQUAL times as much as those of the others."""
        own = len(scores) - 1
        if not 0 < own < self.freedom:
            return False
        variance = _variance(scores)
        others = (self.freedom * self.pooled - own * variance) / (self.freedom - own)
        return variance > UNEQUAL * max(others, self.of_sentences)


@dataclass(frozen=True)
class Spread:
    """The variance between the seeds of one system in an effect."""

    variance: float
    seeds: int
    stands_out: bool  # only the system's own seeds tell how large the variance is

    @property
    def of_mean(self) -> float:
        """Return the variance of the mean over the seeds."""
        return self.variance / self.seeds


@dataclass(frozen=True)
class Effect:
    """An estimate with its variance: a system's mean score over seeds, or the difference of two systems' means."""

    value: float
    spreads: Sequence[Spread]  # of each system
    shared: float  # the part of the variance that more seeds do not reduce
    seeds: SeedVariance
    sentences: int  # number of sentences in the test set

    @property
    def reducible(self) -> float:
        """Compute the part of the variance that more seeds reduce."""
        return sum(spread.of_mean for spread in self.spreads)

    @property
    def variance(self) -> float:
        """Compute the square of the standard error."""
        return self.reducible + self.shared

    @property
    def freedom(self) -> float:
        """Compute the degrees of freedom of the variance (Satterthwaite 1946): those of all systems' seeds, but of its
        own seeds alone for a system that stands out."""
        of_sentences = max(self.sentences - 1, 1)
        if not self.variance or not self.seeds.freedom:
            return of_sentences
        pooled = sum(spread.of_mean for spread in self.spreads if not spread.stands_out)
        own = sum(spread.of_mean**2 / (spread.seeds - 1) for spread in self.spreads if spread.stands_out)
        return self.variance**2 / (pooled**2 / self.seeds.freedom + own + self.shared**2 / of_sentences)

    @property
    def half_width(self) -> float:
        """Compute half the width of the 95 % interval."""
        return t_quantile(0.975, self.freedom) * math.sqrt(self.variance)

    @property
    def p_value(self) -> float:
        """Compute the probability that equal systems differ by at least |value|; 1 if the variance is 0."""
        return t_p_value(self.value / math.sqrt(self.variance), self.freedom) if self.variance else 1.0

    def detectable(self, level: float) -> float:
        """Estimate the true difference that a test at this level finds significant with a probability of 80 %."""
        freedom = self.freedom
        return (t_quantile(1 - level / 2, freedom) + t_quantile(POWER, freedom)) * math.sqrt(self.variance)

    def seeds_needed(self, level: float) -> float | None:
        """Estimate how many seeds of all systems make a true difference of size `value` detectable at this level:
        infinity if even MAX_SEEDS are too few, as the test set is too small; None if the variance between seeds is
        unknown, or if `value` is 0."""
        if not self.seeds.freedom or abs(self.value) <= ROUNDING:
            return None
        counts = range(2, MAX_SEEDS + 1)
        index = bisect_left(counts, True, key=lambda count: self._with(count).detectable(level) <= abs(self.value))
        return counts[index] if index < len(counts) else math.inf

    def _with(self, count: int) -> "Effect":
        """Predict the effect of the same size if all systems had `count` seeds."""
        spreads = [replace(spread, seeds=count) for spread in self.spreads]
        return replace(self, spreads=spreads, seeds=replace(self.seeds, freedom=self.seeds.systems * (count - 1)))


def difference(
    a: Sequence[float], b: Sequence[float], covariance: Floats, sentences: int, seeds: SeedVariance
) -> Effect:
    """Estimate the difference mean(a) - mean(b) of systems A and B from the scores of n_a and n_b seeds.

    covariance: (n_a + n_b, n_a + n_b), the covariance of all scores over bootstrap samples of the sentences, with A's
    scores before B's; sentences: number of sentences in the test set.
    """
    signs = np.repeat([1 / len(a), -1 / len(b)], (len(a), len(b)))
    blocks = covariance[: len(a), : len(a)], covariance[len(a) :, len(a) :]
    return _effect(float(np.mean(a) - np.mean(b)), (a, b), blocks, float(signs @ covariance @ signs), sentences, seeds)


def mean_of_seeds(scores: Sequence[float], covariance: Floats, sentences: int, seeds: SeedVariance) -> Effect:
    """Estimate the mean score of n seeds. covariance: (n, n), of the scores over bootstrap samples of the sentences."""
    return _effect(float(np.mean(scores)), (scores,), (covariance,), float(covariance.mean()), sentences, seeds)


def _effect(
    value: float,
    systems: Sequence[Sequence[float]],
    blocks: Sequence[Floats],
    of_sentences: float,
    sentences: int,
    seeds: SeedVariance,
) -> Effect:
    """Split the variance of an effect: `of_sentences` is the effect's variance over bootstrap samples."""
    unshared = [_unshared_variance(block) if len(block) > 1 else seeds.of_sentences for block in blocks]
    spreads = [
        Spread(max(seeds.of_system(scores), least), len(scores), seeds.stands_out(scores))
        for scores, least in zip(systems, unshared, strict=True)
    ]
    contained = sum(least / len(scores) for scores, least in zip(systems, unshared, strict=True))
    return Effect(value, spreads, max(of_sentences - contained, 0.0), seeds, sentences)


def _variance(scores: Sequence[float]) -> float:
    return float(np.var(scores, ddof=1))


def _unshared_variance(block: Floats) -> float:
    """Compute the part of a seed's variance over bootstrap samples that other seeds of its system do not share: the
    mean variance of a seed minus the mean covariance of two seeds, at least 0. block: (n, n), their covariance."""
    variance, count = float(np.trace(block)) / len(block), len(block)
    return max(variance - (float(block.sum()) - variance * count) / (count * (count - 1)), 0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values by Holm's method: if all corrected values up to a limit count as discoveries, the probability of
    any false discovery is at most this limit.

    The i-th smallest of m values is multiplied by m - i + 1, and then replaced by the corrected value of the (i-1)-th
    if that is larger. Corrected values are at most 1.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[index]))
        corrected[index] = largest
    return corrected


def letters(count: int, different: Collection[tuple[int, int]]) -> list[str]:
    """Assign letters to `count` systems, which are numbered from 0 in the order of their rank.

    Two systems have a letter in common unless their pair is in `different`. Each letter marks a group in which no two
    systems differ and to which no further system can be added. The best system has the letter "a".
    """
    groups = [frozenset(range(count))]
    for pair in different:
        split = [
            part for group in groups for part in ([group - {one} for one in pair] if {*pair} <= group else [group])
        ]
        groups = [group for group in dict.fromkeys(split) if not any(group < other for other in split)]
    groups.sort(key=sorted)
    # Names the groups a, b, ..., z, A, ..., Z, a2, b2, ...
    rounds = (divmod(number, len(ascii_letters)) for number in range(len(groups)))
    names = [ascii_letters[index] + (str(again + 1) if again else "") for again, index in rounds]
    return [
        "".join(name for name, group in zip(names, groups, strict=True) if system in group) for system in range(count)
    ]


def t_p_value(t: float, freedom: float) -> float:
    """Compute the probability of |T| >= |t| for Student's T with `freedom` >= 1 degrees of freedom, whole or not.

    With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom - 1), which is
    integrated by Gauss-Legendre quadrature.
    """
    return min(1.0, _mass(math.atan(abs(t) / math.sqrt(freedom)), freedom) / _mass(0.0, freedom))


def t_quantile(probability: float, freedom: float) -> float:
    """Compute the t with P(T <= t) = probability for Student's T, for a probability in [0.5, 1)."""
    low, high, tail = 0.0, math.pi / 2, 2 * (1 - probability) * _mass(0.0, freedom)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass(middle, freedom) > tail else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _mass(start: float, freedom: float) -> float:
    """Integrate cos(angle)^(freedom - 1) from `start` to pi / 2, but over at most TAIL standard deviations."""
    half = min(math.pi / 2 - start, TAIL / math.sqrt(freedom)) / 2
    angles = start + half * (1 + NODES)
    return float(half * (NODE_WEIGHTS @ np.cos(angles) ** (freedom - 1)))
