"""Tests of two outputs equal sacreBLEU's; tests of several outputs agree with MultEval's published example. The test of
a difference between systems keeps its level and finds true differences; multiple comparisons."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import script
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, Result
from scipy import stats

from nmt.evaluate.metrics import Counts, ScoreSettings, count
from nmt.evaluate.significance import (
    Effect,
    Resampling,
    SeedVariance,
    Spread,
    corpus_score,
    difference,
    half_width,
    holm,
    letters,
    mean_of_seeds,
    paired_bootstrap,
    t_p_value,
    t_quantile,
)

REFERENCES = [f"the {n} small dogs , which run , see {n % 7} red houses ." for n in range(60)]
BASELINE = [line.replace("dogs", "cats") if n % 3 == 0 else line for n, line in enumerate(REFERENCES)]
BETTER = [line.replace("red", "Red") if n % 4 == 0 else line for n, line in enumerate(REFERENCES)]
CLOSE = [line.replace("see", "saw") if n % 3 == 1 and n > 3 else line for n, line in enumerate(REFERENCES)]


def paired(test: str, count: int, lowercase: bool) -> list[Result]:
    """Run a paired test of sacreBLEU. Returns a result for each output, the baseline first, and each metric."""
    outputs = [("baseline", BASELINE), ("better", BETTER), ("close", CLOSE)]
    metrics = {"bleu": BLEU(lowercase=lowercase), "chrf": CHRF(lowercase=lowercase), "ter": TER()}
    _, columns = PairedTest(outputs, metrics, [REFERENCES], test, count)()
    return [result for row in zip(*list(columns.values())[1:], strict=True) for result in row]


def counted(output: list[str], lowercase: bool = False) -> dict[str, Counts]:
    return dict(count(output, REFERENCES, ScoreSettings("13a", lowercase)).counts)


def bootstrap_p(
    resampling: Resampling, baseline: NDArray[np.float64], output: NDArray[np.float64], metric: str
) -> float:
    samples = resampling.bootstrap([baseline, output], metric)
    return paired_bootstrap(samples[0], samples[1], corpus_score(output, metric) - corpus_score(baseline, metric))


@pytest.mark.parametrize("lowercase", [False, True])
def test_scores_intervals_and_p_values_are_sacrebleus(lowercase: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    base, *others = outputs = [counted(lines, lowercase) for lines in (BASELINE, BETTER, CLOSE)]
    resampling, expected = Resampling(len(REFERENCES), 300, 500), paired("bs", 300, lowercase)
    scores = [corpus_score(output[metric], metric) for output in outputs for metric in base]
    assert scores == pytest.approx([result.score for result in expected])
    halves = [half_width(resampling.bootstrap([output[name]], name)[0]) for output in outputs for name in base]
    assert halves == pytest.approx([result.ci for result in expected], abs=1e-5)
    found = [bootstrap_p(resampling, base[name], output[name], name) for output in others for name in base]
    assert found == pytest.approx([result.p_value for result in expected[3:]])
    randomised = [p for output in others for p in resampling.paired_randomisation(base, output).values()]
    assert randomised == pytest.approx([result.p_value for result in paired("ar", 500, lowercase)[3:]])
    assert len(set(randomised)) > 2


def test_equal_scores_differ_by_nothing() -> None:
    resampling = Resampling(5, 100, 100)
    one, other = (count([word] * 5, ["x y z w"] * 5, ScoreSettings("13a", False)).counts for word in "ab")
    assert corpus_score(one["bleu"], "bleu") == corpus_score(other["bleu"], "bleu")
    assert bootstrap_p(resampling, one["bleu"], other["bleu"], "bleu") == 1.0
    assert set(resampling.paired_randomisation(one, other).values()) == {1.0}
    assert resampling.stratified_randomisation([[one["bleu"]], [other["bleu"]]], [(0, 1)], "bleu") == [1.0]


def means(*scores: float) -> NDArray[np.float64]:
    return np.array([[score, 1.0] for score in scores])


def test_p_values_of_means_are_those_of_all_resamples_and_all_signs(mean_metric: str) -> None:
    base, output = means(0.7, 0.5, 0.5, 0.6, 0.3), means(0.92, 0.41, 0.7, 0.83, 0.3)
    differences = (output - base)[:, 0]
    resampled = np.abs([differences[list(drawn)].mean() for drawn in itertools.product(range(5), repeat=5)])
    signed = np.abs([(differences * signs).mean() for signs in itertools.product((-1, 1), repeat=5)])
    exact = [(values > abs(differences.mean()) + 1e-9).mean() for values in (resampled - resampled.mean(), signed)]
    resampling = Resampling(5, 20_000, 20_000)
    randomised = resampling.paired_randomisation({mean_metric: base}, {mean_metric: output})[mean_metric]
    assert [bootstrap_p(resampling, base, output, mean_metric), randomised] == pytest.approx(exact, abs=0.01)
    dealt = resampling.stratified_randomisation([[base], [output]], [(0, 1)], mean_metric)
    assert dealt == pytest.approx([randomised], abs=0.01)  # with one output per system, both tests are equal


def test_the_seed_is_that_of_sacrebleu(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = counted(BASELINE), counted(CLOSE)

    def found() -> tuple[float, ...]:
        resampling = Resampling(len(REFERENCES), 100, 300)
        dealt = resampling.stratified_randomisation([[output["bleu"]] for output in outputs], [(0, 1)], "bleu")
        return (*resampling.paired_randomisation(*outputs).values(), *dealt)

    first = found()
    assert found() == first
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    assert all(a != b for a, b in zip(found(), first, strict=True))


def test_stratified_randomisation_is_that_of_all_exchanges(mean_metric: str) -> None:
    """Enumerates the exchanges in two sentences, of two outputs of system a and one of b. A draw chooses the output of
    a, a coin decides whether it is exchanged."""
    a, b = [means(0.9, 0.4), means(0.75, 0.5)], [means(0.3, 0.2)]
    observed = abs(np.mean(a, axis=0)[:, 0].mean() - b[0][:, 0].mean())
    sentences = [[(0.5, None), (0.25, 0), (0.25, 1)]] * 2  # (probability, output of a that is exchanged)
    exact = 0.0
    for choices in itertools.product(*sentences):
        first, second = [np.array([rows[:, 0] for rows in side]) for side in (a, b)]
        for sentence, (_, run) in enumerate(choices):
            if run is not None:
                first[run, sentence], second[0, sentence] = second[0, sentence], first[run, sentence]
        exact += np.prod([p for p, _ in choices]) * (abs(first.mean() - second.mean()) > observed + 1e-9)
    other = [means(0.3, 0.4), means(0.5, 0.5)]  # further pairs do not change the result
    resampling = Resampling(2, 100, 20_000)
    found = resampling.stratified_randomisation([a, b, other], [(0, 1), (2, 1), (0, 2)], mean_metric)
    assert found[0] == pytest.approx(exact, abs=0.01)
    assert found[0] == resampling.stratified_randomisation([a, b], [(0, 1)], mean_metric)[0]


def test_the_example_of_multeval_has_its_printed_digits() -> None:
    """Reproduces the table in the README of MultEval 0.5.1: 2,489 sentences, three outputs of each system. multeval.npz
    holds sacreBLEU 2.6's counts for these outputs: lengths, matches of BLEU's n-grams and edits of TER."""
    with np.load(Path(__file__).with_name("multeval.npz")) as file:
        arrays = {name: file[name].astype(np.int64) for name in file.files}
    reference = arrays["reference_length"]

    def bleu(output: Counts) -> Counts:
        totals = np.maximum(output[:, :1] - np.arange(4), 0)
        return np.column_stack([output[:, 0], reference, output[:, 1:5], totals])

    def ter(output: Counts) -> Counts:
        return np.column_stack([output[:, 5], reference])

    resampling = Resampling(len(reference), 1000, 1000)
    for metric, count_of, expected in (  # expected: mean, s_sel and s_opt of each system
        ("bleu", bleu, [("18.5", "0.3", "0.1"), ("18.8", "0.3", "0.3")]),
        ("ter", ter, [("65.7", "0.4", "0.2"), ("64.8", "0.4", "0.6")]),
    ):
        outputs = [[count_of(output) for output in arrays[name]] for name in ("baseline", "system_1")]
        found = []
        for system in outputs:
            scores = [corpus_score(output, metric) for output in system]
            spread = resampling.bootstrap(system, metric).std(1, ddof=1).mean()
            found.append(tuple(f"{value:.1f}" for value in (np.mean(scores), spread, np.std(scores, ddof=1))))
        assert found == expected
        (p,) = resampling.stratified_randomisation(outputs, [(0, 1)], metric)
        assert f"{p:.2f}" == "0.00"


study = script("simulate_significance")
SIGNIFICANT = 0.05


def covariance(counts: tuple[int, ...], shared: float, own: float, all_share: float = 0.0) -> NDArray[np.float64]:
    """Make the covariance of runs from a part shared by all, a part shared within a system, and a part of each run."""
    system = np.repeat(np.arange(len(counts)), counts)
    return all_share + shared * (system[:, None] == system) + own * np.eye(sum(counts))


def compared(
    a: Sequence[float], b: Sequence[float], runs: NDArray[np.float64], *others: Sequence[float], sentences: int = 1000
) -> Effect:
    """Estimate mean(a) - mean(b) in a comparison with other systems, whose seeds share the choice of sentences."""
    blocks = [runs[: len(a), : len(a)], runs[len(a) :, len(a) :], *(np.zeros((len(x), len(x))) for x in others)]
    return difference(a, b, runs, sentences, SeedVariance.of([a, b, *others], blocks))


def test_the_variance_is_that_between_seeds_and_that_between_sentences() -> None:
    a, b = [30.0, 31.0, 32.0], [28.0, 30.0]  # the variances 1 and 2, on average (2 x 1 + 2) / 3
    effect = compared(a, b, covariance((3, 2), shared=0.2, own=0.3, all_share=5.0))
    reducible, shared = (4 / 3) / 3 + 2.0 / 2, 2 * 0.2  # the part shared by all runs cancels
    assert effect.value == pytest.approx(2.0)
    assert (effect.reducible, effect.shared) == (pytest.approx(reducible), pytest.approx(shared))
    assert effect.variance == pytest.approx(reducible + shared)
    freedom = (reducible + shared) ** 2 / (reducible**2 / 3 + shared**2 / 999)
    assert effect.freedom == pytest.approx(freedom)
    assert effect.p_value == pytest.approx(t_p_value(2.0 / math.sqrt(reducible + shared), freedom))
    assert effect.half_width == pytest.approx(t_quantile(0.975, freedom) * math.sqrt(reducible + shared))
    mirrored = compared(b, a, covariance((2, 3), shared=0.2, own=0.3, all_share=5.0))
    assert (mirrored.value, mirrored.p_value) == pytest.approx((-effect.value, effect.p_value))


def test_the_variance_of_a_system_is_at_least_the_mean_of_all() -> None:
    alike, spread = [30.0, 30.0], [20.0, 24.0, 28.0]  # the variances 0 and 16
    effect = compared(alike, [31.0, 33.0], np.zeros((4, 4)), spread)
    mean = (0 + 2 + 2 * 16) / 4
    assert effect.reducible == pytest.approx(mean / 2 + mean / 2)
    assert effect.freedom == pytest.approx(4)
    assert compared(spread, alike, np.zeros((5, 5)), [31.0, 33.0]).reducible == pytest.approx(16 / 3 + mean / 2)


def test_a_variance_that_stands_out_has_the_freedom_of_its_own_seeds() -> None:
    steady, like = [31.0, 31.2, 31.1], [30.0, 30.3, 30.1]
    for spread, stands_out in (([20.0, 24.0, 28.0], True), ([20.0, 20.3, 20.5], False)):
        effect = compared(spread, steady, covariance((3, 3), shared=0.02, own=0.0), like)
        assert [part.stands_out for part in effect.spreads] == [stands_out, False]
        first, second = (part.variance / 3 for part in effect.spreads)
        of_seeds = first**2 / 2 + second**2 / 6 if stands_out else (first + second) ** 2 / 6
        assert effect.freedom == pytest.approx(effect.variance**2 / (of_seeds + 0.04**2 / 999))
        assert compared(steady, like, np.zeros((6, 6)), spread).freedom == pytest.approx(6)


def test_a_spread_stands_out_beyond_twice_that_of_the_others() -> None:
    for factor, stands_out in ((1.9, False), (2.1, True)):
        a, *others = [factor * 0.5, 0.0, -factor * 0.5], [0.5, 0.0, -0.5], [0.1, 0.6, 1.1]
        assert SeedVariance.of([a, *others], [np.zeros((3, 3))] * 3).stands_out(a) == stands_out
    by_sentences = SeedVariance.of([a, *others], [covariance((3,), shared=0.0, own=1.0)] * 3)
    assert not by_sentences.stands_out(a)  # the choice of the sentences alone may cause this spread
    assert not SeedVariance.of([a, [0.0], [1.0]], [np.zeros((3, 3))] * 3).stands_out(a)  # no other has several seeds


def test_each_system_has_its_own_part_from_the_choice_of_sentences() -> None:
    a, b = [30.0, 30.1], [31.0, 31.2]
    runs = np.zeros((4, 4))
    runs[:2, :2], runs[2:, 2:] = covariance((2,), shared=0.2, own=0.6), covariance((2,), shared=0.2, own=0.1)
    blocks = [runs[:2, :2], runs[2:, 2:]]
    effect = difference(a, b, runs, 1000, SeedVariance.of([a, b], blocks))
    mean = (0.6 + 0.1) / 2  # larger than the variances of the scores
    assert effect.reducible == pytest.approx(0.6 / 2 + mean / 2)
    assert effect.shared == pytest.approx(0.2 + 0.2)


def test_one_seed_takes_the_variance_of_the_other_systems() -> None:
    several, single = [30.0, 31.0, 32.0], [28.0]
    effect = compared(single, several, covariance((1, 3), shared=0.2, own=0.3))
    assert effect.variance == pytest.approx(1.0 * (1 + 1 / 3) + 2 * 0.2)
    assert effect.freedom == pytest.approx(effect.variance**2 / ((4 / 3) ** 2 / 2 + 0.4**2 / 999))
    both = compared(single, [29.0], covariance((1, 1), shared=0.2, own=0.0), several)
    assert both.reducible == pytest.approx(1.0 + 1.0)
    assert both.freedom < 10


def test_of_one_seed_each_only_sentences_are_known_and_equal_runs_do_not_differ() -> None:
    effect = compared([31.0], [30.0], covariance((1, 1), shared=0.2, own=0.3))
    assert (effect.variance, effect.freedom) == (pytest.approx(1.0), pytest.approx(999))
    assert effect.seeds_needed(0.05) is None
    for runs in ([30.0], [30.0, 30.0]):
        effect = compared(runs, runs, np.zeros((2 * len(runs), 2 * len(runs))))
        assert (effect.value, effect.p_value, effect.half_width) == (0.0, 1.0, 0.0)


def test_the_interval_of_a_mean_contains_both_variances() -> None:
    runs, a = covariance((3,), shared=0.2, own=0.3), [30.0, 31.0, 32.0]
    effect = mean_of_seeds(a, runs, 1000, SeedVariance.of([a], [runs]))
    parts = 1.0 / 3, 0.2
    assert (effect.value, effect.variance) == (31.0, pytest.approx(sum(parts)))
    assert effect.freedom == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 999))
    single = mean_of_seeds([31.0], covariance((1,), shared=0.2, own=0.3), 1000, SeedVariance.of([a, [31.0]], [runs]))
    assert single.variance == pytest.approx(1.0 + 0.2)


def test_the_detectable_difference_is_found_in_four_of_five_trials() -> None:
    rng, size, nothing = np.random.default_rng(0), 6, np.zeros((12, 12))
    exact = Effect(0.0, [Spread(1.0, size, False)] * 2, 0.0, SeedVariance(1.0, 0.0, 2 * (size - 1), 2), 1000)
    gain = exact.detectable(SIGNIFICANT)
    found = [
        compared(rng.standard_normal(size) + gain, rng.standard_normal(size), nothing).p_value < SIGNIFICANT
        for _ in range(1000)
    ]
    assert np.mean(found) == pytest.approx(0.8, abs=0.05)


def test_so_many_seeds_are_needed_that_the_difference_is_detected() -> None:
    a, b = [30.5, 31.0, 31.5], [30.0, 30.4, 30.8]
    effect = compared(a, b, covariance((3, 3), shared=0.02, own=0.1))
    needed = effect.seeds_needed(SIGNIFICANT)
    assert needed is not None
    assert needed > 3
    # With this many seeds of each of two systems, whose scores vary as much, the difference is detected.
    for runs, detected in ((int(needed), True), (int(needed) - 1, False)):
        spreads = [Spread(spread.variance, runs, False) for spread in effect.spreads]
        predicted = Effect(0.0, spreads, effect.shared, SeedVariance(0, 0, 2 * (runs - 1), 2), 1000)
        assert (predicted.detectable(SIGNIFICANT) <= abs(effect.value)) == detected
    corrected = effect.seeds_needed(SIGNIFICANT / 27)
    assert corrected is not None
    assert corrected > needed
    assert compared([40.0, 41.0], [30.0, 30.5], covariance((2, 2), 0.01, 0.01)).seeds_needed(0.05) == 2


def test_equal_systems_rarely_differ_and_unequal_ones_do() -> None:
    equal, _ = study.simulated(100, 300, (3, 3))
    assert equal["seeds and sentences"] <= 10  # the level of 5 % and two standard deviations
    assert equal["covered"] >= 90
    unequal, _ = study.simulated(20, 300, (3, 3), gain=6.0)
    assert min(unequal["seeds and sentences"], unequal["covered"]) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [*study.PAIRS, *study.MANY], ids=str)
def test_of_comparisons_between_equals_few_are_starred(seeds: tuple[int, ...]) -> None:
    others, alike = len(seeds) - 1, len(seeds) == 2 and seeds[0] == seeds[1]
    comparisons = 2000 if others == 1 else 100 * others
    found, every = study.simulated(comparisons, 1000, seeds, others=alike)
    gain, stated = study.power(every, SIGNIFICANT / others)
    assert stated == pytest.approx(gain, rel=0.3 if sum(seeds) < 6 else 0.15)
    assert found["seeds and sentences"] <= 0.055 * comparisons
    if others == 1:
        assert found["covered"] >= 0.945 * comparisons
    else:
        assert found["any star"] <= 8  # of 100: 5 % and 1.4 standard deviations
    if alike:
        assert found["Clark"] > 0.055 * comparisons  # exceeds the level, so no star is given by it


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("systems", [2, 28])
@pytest.mark.parametrize("sd", [0.6, 1.2])
def test_a_system_with_less_stable_seeds_is_seldom_starred(systems: int, sd: float, seeds: int) -> None:
    found = study.unstable_baseline(seeds, systems, sd)
    assert found["raw"] <= {2: 0.14, 3: 0.09, 5: 0.07}[seeds]
    assert found["any star"] <= 0.08 or seeds == 2


def test_holm_multiplies_step_by_step_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # the procedure of Holm 1979
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("count", "different", "expected"),
    [
        (3, [], ["a", "a", "a"]),
        (3, [(0, 1), (0, 2), (1, 2)], ["a", "b", "c"]),
        (3, [(0, 2)], ["a", "ab", "b"]),
        (4, [(0, 2), (0, 3), (1, 3)], ["a", "ab", "bc", "c"]),  # groups may overlap
        (5, [(0, 3), (0, 4), (1, 4)], ["a", "ab", "abc", "bc", "c"]),
        (3, [(0, 1)], ["a", "b", "ab"]),  # the last system differs from neither of the others
        (4, [(0, 1), (2, 3)], ["ab", "cd", "ac", "bd"]),
        (1, [], ["a"]),
    ],
)
def test_systems_share_a_letter_unless_they_differ(
    count: int, different: list[tuple[int, int]], expected: list[str]
) -> None:
    assert letters(count, different) == expected
    assert letters(count, [pair[::-1] for pair in different[::-1]]) == expected


@pytest.mark.parametrize("freedom", [1, 1.37, 2.9, 40, 5e4])
def test_students_distribution_is_that_of_scipy(freedom: float) -> None:
    for t in (0.0, 0.3, 1.0, 2.5, 20.0, -2.5):
        assert t_p_value(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), rel=1e-6, abs=1e-30)
    for probability in (0.5, 0.8, 0.975, 0.9999):
        assert t_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-6, abs=1e-9)
