"""Simulate comparisons of equally good systems, and count how often each test finds a difference.

python scripts/simulate_significance.py     prints the tables of docs/results/notes.md (about an hour on one core)

The systems have about 36 BLEU and vary between seeds. tests/evaluate/test_significance.py runs smaller simulations.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise, product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nmt.compare.compare import SIGNIFICANT
from nmt.evaluate.metrics import Counts, corpus_score
from nmt.evaluate.significance import Effect, Resampling, SeedVariance, difference, holm, t_quantile

PAIRS = [(2, 2), (3, 3), (5, 5), (1, 3), (2, 5)]  # numbers of seeds of two systems
MANY = [(2,) * 28, (3,) * 28, (5,) * 28, (1,) * 9 + (2,) * 19]  # and of 28 systems
LONGEST = 21  # number of tokens of the longest sentence
# Each token has an easiness: its mean is BASE, and an advantage of one BLEU adds SLOPE. Its random parts have these
# standard deviations between sentences, tokens, systems and seeds.
BASE, SLOPE = 0.42, 0.0245
OF_SENTENCE, OF_TOKEN, OF_SYSTEM, OF_SEED = 0.5, 1.0, 0.3, 0.4
SHARED, OWN = 0.05, 0.05  # variance of a normal score by the sentences: shared by a system's seeds, and of each run


def made_outputs(
    rng: np.random.Generator, sentences: int, seeds: Sequence[int], sds: Sequence[float], gain: float = 0.0
) -> list[list[Counts]]:
    """Simulate systems; each is a list of its seeds' statistics of BLEU (N, 10). A token is right if it is easy enough,
    an n-gram if all its tokens are right. The easiness of a token has a part common to all systems, a part per system
    and a part per seed. `sds` are the standard deviations of each system between seeds, in BLEU; `gain` is the last
    system's advantage in BLEU."""
    length = rng.integers(6, LONGEST + 1, sentences)
    reference = length + rng.integers(-1, 2, sentences)
    inside = np.arange(LONGEST) < length[:, None]
    shape = sentences, LONGEST
    easy = BASE + OF_SENTENCE * rng.standard_normal((sentences, 1)) + OF_TOKEN * rng.standard_normal(shape)
    totals = np.stack([length - order for order in range(4)], 1)
    systems = []
    for number, (runs, sd) in enumerate(zip(seeds, sds, strict=True)):
        of_system = easy + OF_SYSTEM * rng.standard_normal(shape)
        outputs = []
        for _ in range(runs):
            shift = SLOPE * (gain * (number == len(seeds) - 1) + sd * rng.standard_normal())
            right = (of_system + shift + OF_SEED * rng.standard_normal(shape) > 0) & inside
            matches = [sliding_window_view(right, order, axis=1).all(-1).sum(1) for order in range(1, 5)]
            outputs.append(np.column_stack([length, reference, *matches, totals]))
        systems.append(outputs)
    return systems


def bleu_of(systems: Sequence[Sequence[Counts]]) -> list[list[float]]:
    """Compute BLEU of each system's outputs."""
    return [[corpus_score(counts, "bleu") for counts in outputs] for outputs in systems]


def effects(systems: Sequence[Sequence[Counts]], resampling: Resampling, sentences: int) -> list[Effect]:
    """Estimate the difference of each system but the last from the last one."""
    cov = np.cov(resampling.bootstrap([counts for outputs in systems for counts in outputs], "bleu"))
    ends = np.cumsum([0, *map(len, systems)])
    places = [list(range(start, end)) for start, end in pairwise(ends)]
    seeds = SeedVariance.of(bleu_of(systems), [cov[np.ix_(own, own)] for own in places])
    *firsts, last = bleu_of(systems)
    return [
        difference(first, last, cov[np.ix_([*own, *places[-1]], [*own, *places[-1]])], sentences, seeds)
        for first, own in zip(firsts, places, strict=False)
    ]


def simulated(
    comparisons: int, sentences: int, seeds: Sequence[int], gain: float = 0.0, others: bool = False
) -> tuple[Counter[str], list[Effect]]:
    """Count how often each test finds a difference from the last system; return the counts and the differences. The
    standard deviation of each system between seeds is drawn from 0.3 to 0.6 BLEU. "covered" counts the intervals that
    contain the true difference, "any star" the simulations in which Holm's correction leaves a star. others: also run
    the tests of Clark et al. and of sentences seed by seed, for two systems."""
    rng, resampling = np.random.default_rng(1), Resampling(sentences, 500, 500)
    found: Counter[str] = Counter()
    every: list[Effect] = []
    for _ in range(comparisons // (len(seeds) - 1)):
        sds = rng.uniform(0.3, 0.6, len(seeds))
        systems = made_outputs(rng, sentences, seeds, sds.tolist(), gain)
        estimates = effects(systems, resampling, sentences)
        every += estimates
        found["seeds and sentences"] += sum(effect.p_value < SIGNIFICANT for effect in estimates)
        found["covered"] += sum(abs(effect.value + gain) < effect.half_width for effect in estimates)
        found["any star"] += min(holm([effect.p_value for effect in estimates])) < SIGNIFICANT
        if others:
            first, second = bleu_of(systems)
            found["Clark"] += resampling.stratified_randomisation(systems, [(0, 1)], "bleu")[0] < SIGNIFICANT
            gains = [b - a for a, b in zip(first, second, strict=True)]
            outputs = zip(*systems, strict=True)
            by_seed = [resampling.paired_randomisation({"bleu": a}, {"bleu": b})["bleu"] for a, b in outputs]
            found["one seed"] += by_seed[0] < SIGNIFICANT
            found["every seed"] += max(by_seed) < SIGNIFICANT and abs(sum(map(np.sign, gains))) == len(gains)
    return found, every


def power(every: Sequence[Effect], level: float) -> tuple[float, float]:
    """Return the gain that is found in 80 % of simulated comparisons, and the median of the stated ones."""
    least = [t_quantile(1 - level / 2, effect.freedom) * math.sqrt(effect.variance) - effect.value for effect in every]
    return float(np.quantile(least, 0.8)), float(np.median([effect.detectable(level) for effect in every]))


class MadeScores:
    """Equally good systems with normally distributed scores: faster than outputs, for many systems."""

    def __init__(self, rng: np.random.Generator, sds: Sequence[float], seeds: int) -> None:
        """sds: the standard deviation between seeds of each system, in BLEU; seeds: their number for each system."""
        shared = math.sqrt(SHARED) * rng.standard_normal((len(sds), 1))
        spread = np.sqrt(np.square(sds) + OWN)[:, None]
        self.scores = (shared + spread * rng.standard_normal((len(sds), seeds))).tolist()
        same: NDArray[np.float64] = np.kron(np.eye(2), np.ones((seeds, seeds)))
        self.covariance = SHARED * same + OWN * np.eye(2 * seeds)
        self.seeds = SeedVariance.of(self.scores, [self.covariance[:seeds, :seeds]] * len(sds))

    def effect(self, a: int, b: int) -> Effect:
        return difference(self.scores[a], self.scores[b], self.covariance, 1000, self.seeds)


def chosen_baseline(seeds: int, simulations: int, systems: int = 28) -> dict[str, float]:
    """Compare all systems with the one that has the best score, and return shares: of intervals that contain the true
    difference, and of simulations with a star if p is corrected for all pairs, and if only for those of the best."""
    rng, found = np.random.default_rng(1), Counter[str]()
    for _ in range(simulations):
        made = MadeScores(rng, rng.uniform(0.3, 0.6, systems).tolist(), seeds)
        best = int(np.argmax(np.mean(made.scores, 1)))
        pairs = {pair: made.effect(*pair) for pair in combinations(range(systems), 2)}
        corrected = dict(zip(pairs, holm([effect.p_value for effect in pairs.values()]), strict=True))
        of_best = [pair for pair in pairs if best in pair]
        found["covered"] += sum(abs(pairs[pair].value) < pairs[pair].half_width for pair in of_best)
        found["all pairs"] += min(corrected[pair] for pair in of_best) < SIGNIFICANT
        found["pairs of the best"] += min(holm([pairs[pair].p_value for pair in of_best])) < SIGNIFICANT
    return {name: count / simulations / (systems - 1 if name == "covered" else 1) for name, count in found.items()}


def unstable_baseline(seeds: int, systems: int, sd: float, simulations: int = 2000) -> dict[str, float]:
    """Compare systems with one whose seeds vary by `sd` BLEU, the others' by 0.2, and return shares of simulations: one
    raw p is below 0.05, any system has a star, the baseline stands out. It is the worst case, because the error of the
    baseline is in all comparisons."""
    rng, found = np.random.default_rng(1), Counter[str]()
    for _ in range(simulations):
        made = MadeScores(rng, [sd, *[0.2] * (systems - 1)], seeds)
        raw = [made.effect(system, 0).p_value for system in range(1, systems)]
        found["raw"] += raw[0] < SIGNIFICANT
        found["any star"] += min(holm(raw)) < SIGNIFICANT
        found["stands out"] += made.seeds.stands_out(made.scores[0])
    return {name: count / simulations for name, count in found.items()}


def main() -> None:
    for seeds in (*PAIRS, *MANY):
        others = len(seeds) - 1
        comparisons = 2000 if others == 1 else 100 * others
        found, every = simulated(comparisons, 1000, seeds, others=others == 1 and seeds[0] == seeds[1])
        shares = {name: f"{count / (100 if name == 'any star' else comparisons):.2%}" for name, count in found.items()}
        print(seeds, shares, "80 % find, stated:", power(every, SIGNIFICANT / others))
    for number in (2, 3):
        print("chosen baseline", number, chosen_baseline(number, 500))
    for sd, systems, number in product((0.6, 1.2), (2, 28), (2, 3, 5)):
        print("unstable baseline", systems, sd, number, unstable_baseline(number, systems, sd))


if __name__ == "__main__":
    main()
