"""Tests between outputs of one test set, from their sentence statistics.

An output is an array (N, k) for each metric: sacreBLEU's counts of N sentences, or their scores with a 1 beside each
(nmt.evaluate.formulas). Every resampling is then a product of matrices (R, N) and (N, k).

- Two outputs: paired bootstrap resampling (Koehn 2004) and paired approximate randomisation (Riezler and Maxwell 2005),
  with the results of `sacrebleu --paired-bs` and `--paired-ar`.
- Two systems with several outputs each, one for each seed: stratified approximate randomisation (Clark et al. 2011).
  nmt.evaluate.effects has the test that also contains the variance between seeds.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nmt.evaluate.formulas import FORMULAS, Floats

Statistics = NDArray[np.int64] | NDArray[np.float64]
Output = Mapping[str, Statistics]  # (N, k) by metric
CHUNK = 500  # resamplings at a time
ROUNDING = 1e-9  # a difference between scores that is due to the order of sums


class Resampling:
    """Scores and tests on resampled sentences. All outputs of a test set share the draws, which are sacreBLEU's."""

    def __init__(self, sentences: int, samples: int, trials: int) -> None:
        """Number of sentences N, bootstrap samples R and randomisation trials. $SACREBLEU_SEED sets the seed."""
        self.samples, self.trials = samples, trials
        drawn = _generator().choice(sentences, size=(samples, sentences), replace=True)
        self._weights = np.stack([np.bincount(row, minlength=sentences) for row in drawn]).astype(np.uint16)
        self._swaps = _generator().integers(2, size=(trials, sentences), dtype=bool)

    def bootstrap(self, outputs: Sequence[Statistics], metric: str) -> Floats:
        """The scores of M outputs on the bootstrap samples, (M, R)."""
        beside = _beside(outputs)
        sums = (chunk @ beside for chunk in _chunks(self._weights))
        return np.concatenate([FORMULAS[metric](part.reshape(len(part), len(outputs), -1)) for part in sums]).T

    def paired_randomisation(self, baseline: Output, output: Output) -> dict[str, float]:
        """p of the difference by paired approximate randomisation, by metric; 1 for equal scores."""
        one, other = (_beside(list(side.values())) for side in (baseline, output))
        total, edges = one.sum(0) + other.sum(0), np.cumsum([0, *(rows.shape[1] for rows in output.values())])
        differences: dict[str, list[Floats]] = {name: [] for name in output}
        for chunk in _chunks(self._swaps):
            swapped = other.sum(0) + chunk @ (one - other)
            for name, (start, end) in zip(output, pairwise(edges), strict=True):
                sides = (FORMULAS[name](sums[:, start:end]) for sums in (swapped, total - swapped))
                differences[name].append(np.abs(np.subtract(*sides)))
        return {
            name: _p_value(np.concatenate(parts), score(output[name], name) - score(baseline[name], name))
            for name, parts in differences.items()
        }

    def stratified_randomisation(
        self,
        systems: Sequence[Sequence[Statistics]],
        pairs: Sequence[tuple[int, int]],
        metric: str,
        progress: Callable[[int], object] = lambda _: None,
    ) -> list[float]:
        """p of the difference between each pair of systems, which are numbered from 0 and have a list of outputs each.

        For every sentence, the outputs of the two systems are paired at random, and each pair is exchanged with
        probability 1/2 (Clark et al. 2011, and their program MultEval). An output without a partner stays. A system's
        score is that of the sums over all its outputs. Whether other seeds would show a difference is not asked.
        `progress` receives the number of pairs done.
        """
        formula, stacks = FORMULAS[metric], [np.stack([np.asarray(rows, float) for rows in each]) for each in systems]
        totals = [stack.sum((0, 1)) for stack in stacks]
        observed = {(a, b): float(formula(totals[a]) - formula(totals[b])) for a, b in pairs}
        found: dict[tuple[int, int], float] = {}
        for shape in dict.fromkeys((len(stacks[a]), len(stacks[b])) for a, b in pairs):
            members = [(a, b) for a, b in pairs if (len(stacks[a]), len(stacks[b])) == shape]
            differences: dict[tuple[int, int], list[Floats]] = {pair: [] for pair in members}
            for dealt in self._deal(stacks, [sorted({pair[side] for pair in members}) for side in (0, 1)], shape):
                for a, b in members:
                    first = dealt[0][a] + dealt[1][b]
                    both = formula(first), formula(totals[a] + totals[b] - first)
                    differences[a, b].append(np.abs(both[0] - both[1]))
            found |= {pair: _p_value(np.concatenate(parts), observed[pair]) for pair, parts in differences.items()}
            progress(len(members))
        return [found[pair] for pair in pairs]

    def _deal(
        self, stacks: Sequence[Floats], sides: Sequence[Sequence[int]], shape: tuple[int, int]
    ) -> Iterator[list[dict[int, Floats]]]:
        """For parts of the trials, what each system of each side gives to the first side's sums: (trials, k) each.

        Of every sentence's pairs of outputs, a binomial number is exchanged, each output with the same probability.
        """
        rng = _generator()
        beside = [
            [_beside([stacks[system][run] for system in side]) for run in range(n)]
            for side, n in zip(sides, shape, strict=True)
        ]
        for start in range(0, self.trials, CHUNK):
            drawn = min(CHUNK, self.trials - start), stacks[0].shape[1]
            exchanged = rng.binomial(min(shape), 0.5, drawn).astype(np.float32)
            dealt: list[dict[int, Floats]] = []
            for side, runs, chosen in zip(sides, beside, (shape[0] - exchanged, exchanged), strict=True):
                missing, sums = chosen.copy(), np.zeros((len(chosen), runs[0].shape[1]))
                for left, run in zip(range(len(runs), 0, -1), runs, strict=True):
                    taken = rng.random(drawn, np.float32) * left < missing
                    missing -= taken
                    sums += taken.astype(float) @ run
                dealt.append(dict(zip(side, np.split(sums, len(side), 1), strict=True)))
            yield dealt


def score(output: Statistics, metric: str) -> float:
    """The score of an output (N, k) by a metric of FORMULAS."""
    return float(FORMULAS[metric](np.asarray(output.sum(0), float)))


def half_width(scores: Floats) -> float:
    """Half the width of the 95 % interval that the scores of bootstrap samples (R,) cover, as sacreBLEU computes it."""
    low, ordered = len(scores) // 40, np.sort(scores)
    return float(ordered[len(scores) - low - 1] - ordered[low]) / 2


def paired_bootstrap(baseline: Floats, scores: Floats, observed: float) -> float:
    """p of an observed difference, from the scores of two outputs on the same bootstrap samples (R,); 1 for 0."""
    differences = np.abs(scores - baseline)
    return _p_value(differences - differences.mean(), observed)


def _p_value(differences: Floats, observed: float) -> float:
    """The share of resampled differences (R,) that exceed the observed one, which itself counts as one of them."""
    if abs(observed) <= ROUNDING:
        return 1.0
    return float(1 + (differences > abs(observed) + ROUNDING).sum()) / (1 + len(differences))


def _beside(outputs: Sequence[Statistics]) -> Floats:
    return np.concatenate([np.asarray(rows, float) for rows in outputs], 1)


def _chunks(draws: NDArray[np.uint16] | NDArray[np.bool_]) -> Iterator[Floats]:
    """(R, N) in parts, as numbers to multiply with."""
    return (draws[start : start + CHUNK].astype(float) for start in range(0, len(draws), CHUNK))


def _generator() -> np.random.Generator:
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    return np.random.default_rng(None if seed.lower() == "none" else int(seed))
