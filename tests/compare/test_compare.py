"""Comparisons: runs grouped into systems, ranking by a metric, significance tests, costs and examples."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import REFERENCES, SOURCES, make_run, worsened

from nmt.compare.compare import compare, group
from nmt.compare.entry import Entry, HeldOut, System, Training, Validation, read_run
from nmt.compare.report import compare_runs, notes, tables
from nmt.config.errors import UserError
from nmt.evaluate.metrics import METRICS, Counts, ScoreSettings, count, score, score_by_length
from nmt.evaluate.significance import (
    Resampling,
    SeedVariance,
    corpus_score,
    difference,
    half_width,
    holm,
    mean_of_seeds,
    paired_bootstrap,
)
from nmt.system.text_table import terminal

SETTINGS = ScoreSettings("13a", False)
OUTPUTS = {("good", 1): worsened(9), ("good", 2): worsened(10), ("bad", 1): worsened(2), ("bad", 2): worsened(9)}
QUICK: dict[str, Any] = {"bootstrap_samples": 200, "randomisation_trials": 200}


def entries() -> list[Entry]:
    return [Entry(f"{name}{seed}", lines, seed, name, {"attention": name}) for (name, seed), lines in OUTPUTS.items()]


def compared(given: list[Entry] | None = None, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    test_set = HeldOut(SOURCES, REFERENCES, SETTINGS)
    members = group(entries() if given is None else given)
    return compare(members, test_set, "test", **{**QUICK, "examples": 12, "sentences": [], **settings})


def bleu(name: str, seed: int) -> float:
    return score(OUTPUTS[name, seed], REFERENCES, SETTINGS, ("bleu",))["bleu"]


def test_the_best_mean_is_first_and_the_baseline() -> None:
    found = compared(entries()[::-1])
    ranked = [(row["rank"], row["name"], row["seeds"]) for row in found["systems"]]
    assert (found["baseline"], ranked) == ("good", [(1, "good", [1, 2]), (2, "bad", [1, 2])])
    for row in found["systems"]:
        values = [bleu(row["name"], seed) for seed in (1, 2)]
        assert row["bleu"] == pytest.approx(statistics.mean(values), abs=1e-3)
        assert row["bleu_sd"] == pytest.approx(statistics.stdev(values), abs=1e-3)
    assert found["signatures"] == count(REFERENCES, REFERENCES, SETTINGS).signatures
    assert (found["sentences"], found["split"]) == (60, "test")


def counted(name: str, seed: int) -> dict[str, Counts]:
    return dict(count(OUTPUTS[name, seed], REFERENCES, SETTINGS).counts)


def test_a_run_is_tested_against_the_baselines_run_of_its_seed() -> None:
    found = compared(baseline="good")
    resampling = Resampling(60, 200, 200)
    runs = {row["run"]: row for row in found["runs"]}
    for seed in (1, 2):
        good, bad = (counted(name, seed) for name in ("good", "bad"))
        row = runs[f"bad{seed}"]
        assert row["baseline_run"] == f"good{seed}"
        randomised = resampling.paired_randomisation(good, bad)
        for metric, prefix in (("bleu", ""), ("chrf", "chrf_"), ("ter", "ter_")):
            samples = resampling.bootstrap([good[metric], bad[metric]], metric)
            observed = corpus_score(bad[metric], metric) - corpus_score(good[metric], metric)
            assert row[f"{prefix}p_bootstrap"] == paired_bootstrap(samples[0], samples[1], observed)
            assert row[f"{prefix}p_randomisation"] == randomised[metric]
            assert row[f"{metric}_ci"] == pytest.approx(half_width(samples[1]), abs=1e-3)
        assert runs[f"good{seed}"]["p_bootstrap"] is None
    assert len({runs[f"bad{seed}"]["p_bootstrap"] for seed in (1, 2)}) == 2


def test_a_system_is_tested_with_the_variance_of_its_seeds_and_that_of_sentences() -> None:
    found = compared(baseline="good")
    good, bad = found["systems"]
    assert good["difference"] is good["p"] is good["p_raw"] is None
    outputs = [counted(name, seed)["bleu"] for name in ("bad", "good") for seed in (1, 2)]
    resampling, scores = Resampling(60, 200, 200), [corpus_score(counts, "bleu") for counts in outputs]
    covariance = np.cov(resampling.bootstrap(outputs, "bleu"))
    seeds = SeedVariance.of([scores[:2], scores[2:]], [covariance[:2, :2], covariance[2:, 2:]])
    expected = difference(scores[:2], scores[2:], covariance, 60, seeds)
    assert bad["difference"] == pytest.approx(expected.value, abs=1e-3)
    assert bad["difference"] == pytest.approx(bad["bleu"] - good["bleu"], abs=1e-3)
    assert bad["difference_ci"] == pytest.approx(expected.half_width, abs=1e-3)
    assert bad["p"] == bad["p_raw"] == pytest.approx(expected.p_value)
    assert bad["detectable"] == pytest.approx(expected.detectable(0.05), abs=1e-3)
    stratified = resampling.stratified_randomisation([outputs[:2], outputs[2:]], [(0, 1)], "bleu")
    assert [bad["p_stratified"]] == stratified
    own = mean_of_seeds(scores[:2], covariance[:2, :2], 60, seeds)
    assert bad["bleu_ci"] == pytest.approx(own.half_width, abs=1e-3)
    (row,) = found["differences"]
    assert row == {"system": "bad", "baseline": "good"} | {key: bad[key] for key in row if key in bad}


def field_of(**every: Sequence[int]) -> list[Entry]:
    """Make systems by name. Each number n makes one run, in which every n-th sentence is bad."""
    return [
        Entry(f"{name}{seed}", worsened(step), seed, name, {"attention": name})
        for name, steps in every.items()
        for seed, step in enumerate(steps, 1)
    ]


FIELD = field_of(best=(30, 31, 32), close=(20, 31, 15), worse=(4, 5, 4), worst=(2, 2, 2))


def test_p_is_corrected_for_the_number_of_comparisons() -> None:
    rows = {row["name"]: row for row in compared(FIELD, baseline="best")["systems"]}
    raw = [rows[name]["p_raw"] for name in ("close", "worse", "worst")]
    assert [rows[name]["p"] for name in ("close", "worse", "worst")] == pytest.approx(holm(raw))
    assert rows["worst"]["p"] < 0.05 < rows["close"]["p"]
    alone = compared([e for e in FIELD if e.choices["attention"] in ("best", "worse")], baseline="best")["systems"][1]
    assert alone["difference"] == rows["worse"]["difference"]
    assert alone["p"] == alone["p_raw"]
    assert alone["p_raw"] != rows["worse"]["p_raw"]  # the other systems inform about the variance between seeds


def test_too_few_resamplings_for_many_single_seeds_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    runs = [Entry(f"system {number}", worsened(number)) for number in range(2, 7)]
    compared(runs, baseline="all", bootstrap_samples=250)  # 10 pairs: p is at least 10 / 201
    compared(FIELD, baseline="all", bootstrap_samples=100)  # several seeds: a t test
    assert not caplog.records
    compared(runs, baseline="all", bootstrap_samples=150)
    assert "with 10 comparisons no p can be below 0.066" in caplog.text


def test_all_pairs_are_tested_and_grouped_by_letters() -> None:
    found = compared(FIELD, baseline="all")
    assert found["baseline"] is None
    assert len(found["differences"]) == 6
    letters = {row["name"]: row["letters"] for row in found["systems"]}
    for row in found["differences"]:
        assert (row["p"] < 0.05) == (not set(letters[row["system"]]) & set(letters[row["baseline"]]))
        assert row["difference"] < 0  # the baseline of a row is the better system
    assert letters["best"] == letters["close"] == "a"
    assert "a" not in letters["worst"]
    assert {row["p_bootstrap"] for row in found["runs"]} == {None}


def test_the_best_is_chosen_by_its_scores_so_p_is_corrected_for_all_pairs() -> None:
    chosen, pairs, named = (compared(FIELD, baseline=baseline) for baseline in (None, "all", "best"))
    for found, comparisons, lead in ((chosen, 6, True), (pairs, 6, False), (named, 3, False)):
        assert found["comparisons"] == comparisons
        assert ("part of its lead is chance" in " ".join(notes(found))) == lead
    assert chosen["differences"] == [row for row in pairs["differences"] if row["baseline"] == "best"]
    for row, other in zip(named["systems"][1:], chosen["systems"][1:], strict=True):
        assert row["p_raw"] == other["p_raw"]
        assert row["p"] <= other["p"]
    assert named["systems"][3]["p"] < chosen["systems"][3]["p"]


@pytest.mark.parametrize(("changed", "p"), [(1, 1.0), (3, 0.25), (4, 0.125), (6, 0.03125)])
def test_a_few_sentences_cannot_be_significant(changed: int, p: float) -> None:
    lines = [f"{line} x y z" if number < changed else line for number, line in enumerate(REFERENCES)]
    found = compared([Entry("a", REFERENCES), Entry("b", lines)], baseline="a")
    assert found["systems"][1]["p"] == pytest.approx(p, abs=0.02)
    assert found["systems"][1]["p"] >= p
    assert found["runs"][1]["p_randomisation"] <= p  # as sacreBLEU


def test_equal_means_need_no_number_of_seeds() -> None:
    found = compared(field_of(a=(9, 10), b=(10, 9)))
    assert found["differences"][0]["seeds_needed"] is None
    for comparison, single in ((found, False), (compared(entries()[::2]), True)):
        assert ("No system has a second seed" in notes(comparison)[0]) == single


def test_without_its_seed_in_the_baseline_a_run_meets_the_first() -> None:
    found = compared([*entries(), Entry("their system", worsened(4))], baseline="bad")
    runs = {row["run"]: row["baseline_run"] for row in found["runs"]}
    assert runs == {"good1": "bad1", "good2": "bad2", "bad1": None, "bad2": None, "their system": "bad1"}
    assert next(row for row in found["systems"] if row["name"] == "their system")["bleu_sd"] is None


def trained(name: str, seed: int, update_seconds: float, curve: dict[int, float], machine: str = "a CPU") -> Entry:
    points = [Validation(updates, updates / 10, {"bleu": bleu}, None) for updates, bleu in curve.items()]
    training = Training(100.0, max(curve), update_seconds, 1000.0, 5.0 + seed, machine, points)
    lines = [f"{line} {seed}" for line in REFERENCES]
    return Entry(f"{name}{seed}", lines, seed, name, {"attention": name}, parameters=1234, training=training)


def test_at_an_equal_budget_scores_are_read_from_the_learning_curves() -> None:
    """20 updates of the fastest system take 30 s, the mean of its seeds. The other system makes 7.5 in this time."""
    given = [trained("fast", seed, seconds, {10: 8.0, 20: 12.0}) for seed, seconds in ((1, 1.0), (2, 2.0))]
    given += [trained("slow", 1, 4.0, {5: 20.0, 10: 24.0, 40: 26.0}), trained("late", 1, 4.0, {10: 20.0, 20: 30.0})]
    given += [Entry("their system", worsened(4))]
    result = compared(given, baseline="fast")
    rows = {row["name"]: row for row in result["systems"]}
    fast, slow, other = (rows[name] for name in ("fast", "slow", "their system"))
    assert result["budget"] == {"updates": 20, "seconds": 30.0}
    assert (fast["equal_updates"], slow["equal_updates"]) == pytest.approx((12.0, 24 + 2 / 3), abs=1e-4)
    assert fast["equal_time"] == pytest.approx(12.0)
    assert slow["equal_time"] == pytest.approx(20.0 + 4.0 * 2.5 / 5)
    assert rows["late"]["equal_time"] is None  # its first validation comes later
    assert [slow[key] for key in ("update_milliseconds", "cost_seconds", "perplexity")] == [4000.0, 160.0, 6.0]
    assert {other[key] for key in ("equal_updates", "equal_time", "update_milliseconds", "seconds")} == {None}
    assert slow["curve"] == [
        {"updates": 5, "epoch": 0.5, "seconds": 20.0, "score": 20.0},
        {"updates": 10, "epoch": 1.0, "seconds": 40.0, "score": 24.0},
        {"updates": 40, "epoch": 4.0, "seconds": 160.0, "score": 26.0},
    ]


def test_a_mean_curve_has_all_seeds_at_each_point() -> None:
    """Seed 1 is validated later and stops earlier. Its curve is linear between validations and constant at its end."""
    given = [trained("a", 1, 1.0, {10: 8.0, 20: 12.0}), trained("a", 2, 3.0, {5: 4.0, 15: 20.0, 30: 22.0})]
    (row,) = compared(given)["systems"]
    points = {point["updates"]: (point["seconds"], point["score"]) for point in row["curve"]}
    assert points == {10: (20.0, 10.0), 15: (30.0, 15.0), 20: (40.0, pytest.approx(16.3333)), 30: (60.0, 17.0)}


def test_costs_and_curves_are_means_of_what_is_known(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), worsened(n + 2), f"seed={n}") for n in (1, 2)]
    (tmp_path / "2" / "metrics.jsonl").write_text('{"step": 10, "epoch": 1.0, "validation/bleu": 30.0}\n')
    (tmp_path / "2" / "manifest.json").write_text('{"starts": [{}], "training": {"seconds": 20, "epochs": 1}}')
    (row,) = compared([read_run(run, "test")[0] for run in runs])["systems"]
    assert (row["seconds"], row["update_milliseconds"], row["parameters"]) == (40.0, 2000.0, 1234.0)
    assert (row["tokens_per_second"], row["sentences_per_second"]) == (1000.0, 50.0)
    assert row["aer"] == pytest.approx(50.0)
    assert [(point["updates"], point["score"]) for point in row["curve"]] == [(10, 20.0), (20, 25.0)]
    counts = [count(worsened(n + 2), REFERENCES, SETTINGS).counts["bleu"] for n in (1, 2)]
    longest = [score_by_length(each, "bleu", SOURCES, 5)[-1]["score"] for each in counts]
    assert row["longest"] == pytest.approx(statistics.mean(longest), abs=1e-3)  # type: ignore[type-var]


def test_half_of_the_examples_differ_most_and_half_are_of_all_lengths() -> None:
    numbers = [row["number"] for row in compared(examples=6)["examples"]]
    assert len(numbers) == 6
    scores = [METRICS["bleu"].of_sentences(counted(name, 1)["bleu"]) for name in ("good", "bad")]
    spread = [abs(good - bad) for good, bad in zip(*scores, strict=True)]
    assert sorted(spread[number - 1] for number in numbers)[-3:] == sorted(spread)[-3:]
    lengths = [len(source.split()) for source in SOURCES]
    chosen = [lengths[number - 1] for number in numbers]
    assert (min(chosen), max(chosen)) == (min(lengths), max(lengths))
    assert [len(compared(examples=n)["examples"]) for n in (0, 1000)] == [0, 60]


def test_an_example_holds_every_system_with_its_alignment(tmp_path: Path) -> None:
    run, _ = read_run(make_run(tmp_path / "a", worsened(2)), "test")
    found = compared([run, Entry("their system", worsened(4))], sentences=[14])
    (example,) = found["examples"]
    assert (example["number"], example["source"], example["reference"]) == (14, SOURCES[13], REFERENCES[13])
    by_system = {each["system"]: each for each in example["translations"]}
    assert by_system["bahdanau"]["text"] == worsened(2)[13]
    assert by_system["bahdanau"]["alignment"]["weights"] == [[90, 10], [5, 95]]
    assert by_system["their system"]["alignment"] is None
    assert by_system["their system"]["score"] == 100.0
    with pytest.raises(UserError, match="sentences=61: the held-out set has 60"):
        compared(sentences=[61])


@pytest.mark.parametrize(
    "text",
    [
        "{}\n",
        '{"source": ["a"], "target": ["b"], "weights": [[NaN]]}\n' * 60,
    ],
)
def test_a_damaged_file_of_word_weights_is_named(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", worsened(2))
    (run / "alignments" / "test.words.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"test\.words\.jsonl: is damaged .*; evaluate the run again"):
        compared([read_run(run, "test")[0]], sentences=[3])


def entry(name: str, seed: int = 1, **asked: str) -> Entry:
    asked = {"attention": "bahdanau", **asked}
    return Entry(name, ["x"], seed, str(sorted(asked.items())), {key.replace("_", "."): v for key, v in asked.items()})


def names_of(*entries: Entry) -> list[str]:
    return [system.name for system in group(entries)]


def test_seeds_are_put_together_in_order_and_a_name_says_what_differs_and_nothing_else() -> None:
    two, one, other = entry("a2", 2), entry("a1", 1), entry("b1", 1, attention="none")
    assert group([two, other, one]) == [System("bahdanau", [one, two]), System("none", [other])]
    none, score = entry("a", attention="none", encoder="gru"), {"attention": "bahdanau", "attention/score": "dot"}
    rates = entry("a", optimizer_lr="0.1"), entry("b", optimizer_lr="0.2"), entry("c")
    halves = entry("a", encoder_dropout="0.1", decoder_dropout="0.3"), entry("b", encoder_dropout="0.3")
    assert names_of(entry("a")) == ["bahdanau"]
    assert names_of(none, entry("b", encoder="gru")) == ["none", "bahdanau"]
    assert names_of(none, entry("b", encoder="lstm")) == ["none encoder=gru", "bahdanau encoder=lstm"]
    assert names_of(*rates) == ["lr=0.1", "lr=0.2", "bahdanau"]
    assert names_of(*halves) == ["decoder.dropout=0.3 encoder.dropout=0.1", "encoder.dropout=0.3"]
    assert names_of(entry("a"), Entry("c", ["x"], 1, "other", score)) == ["bahdanau", "attention/score=dot"]


def test_what_differs_within_a_system_does_not_name_it() -> None:
    def tuned(name: str, seed: int, start: str) -> Entry:
        return Entry(name, ["x"], seed, "tuned", {"optimizer.lr": "0.1", "training.start_from": start})

    two = tuned("b1", 1, "a1"), tuned("b2", 2, "a2")
    assert names_of(Entry("a1", ["x"], 1, "first", {"optimizer.lr": "0.3"}), *two) == ["lr=0.3", "lr=0.1"]
    said = Entry("c", ["x"], 1, "wide", {"encoder.hidden": "256"})  # sets the default value
    wider = Entry("d", ["x"], 1, "wider", {"encoder.hidden": "512"})
    assert names_of(said, Entry("c", ["x"], 2, "wide", {}), wider) == ["hidden=256", "hidden=512"]


def test_equal_names_get_the_directory_too_and_an_output_of_another_system_its_own() -> None:
    by_hand = Entry("runs/x", ["x"], 1, "edited", {"attention": "bahdanau"})
    assert names_of(entry("runs/a"), by_hand) == ["bahdanau (runs/a)", "bahdanau (runs/x)"]
    assert names_of(Entry("runs/x", ["x"], 1, "from Python", {})) == ["runs/x"]
    peers = Entry("one", ["x"]), Entry("two", ["x"])
    assert names_of(entry("a"), *peers) == ["bahdanau", "one", "two"]
    assert names_of(entry("a"), entry("b", attention="none"), peers[0]) == ["bahdanau", "none", "one"]


def test_runs_of_the_same_seed_count_once(caplog: pytest.LogCaptureFixture) -> None:
    one, copy, second = entry("a"), entry("b"), entry("s", 2)
    rerun = Entry("c", ["y"], 1, one.config, one.choices)  # as on another machine
    assert group([one, copy, rerun, second]) == [System("bahdanau", [one, second])]
    for name in "bc":
        assert f"left out: {name} has the configuration and the seed of a" in caplog.text
    tuned = [Entry(name, ["x"], 1, "tuned", {"training.start_from": name}) for name in ("d", "e")]
    (system,) = group(tuned)
    assert system.entries == tuned  # they start from different runs


@pytest.mark.parametrize("choices", [{}, {"data.path": "elsewhere"}])
def test_an_archive_or_another_path_of_the_corpus_makes_no_second_seed(choices: dict[str, str]) -> None:
    run, other = (entry(name, **{"data.path": "here"}) for name in ("a", "b"))
    same = Entry("c", ["x"], 1, run.config, {"attention": "bahdanau", **choices})
    none = entry("d", attention="none")
    assert group([run, other, same, none]) == [System("bahdanau", [run]), System("none", [none])]


# BLEU and chrF prefer WORDS, TER prefers ORDER.
ORDER = worsened(1)
WORDS = [line if n % 4 else "ganz andere wörter" for n, line in enumerate(REFERENCES)]


@pytest.fixture
def _two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("order"), ORDER)
    make_run(Path("words"), WORDS, "encoder.layers=2")


def of_metric(metric: str | None = None, **settings: str) -> dict[str, Any]:
    return compare_runs(["order", "words"], metric=metric, **QUICK, examples=2, sentences=[], **settings)


@pytest.mark.usefixtures("_two_runs")
@pytest.mark.parametrize(("metric", "first"), [("bleu", "words"), ("chrf", "words"), ("ter", "order")])
def test_the_metric_ranks_and_its_tests_are_shown(metric: str, first: str) -> None:
    result = of_metric(metric)
    assert (result["metric"], result["runs"][0]["run"]) == (metric, first)
    assert f"{METRICS[metric].heading} {result['signatures'][metric]}" in tables(result, terminal).splitlines()[0]
    best, second = result["systems"]
    assert result["baseline"] == best["name"]
    assert (best[metric] < second[metric]) == (metric == "ter")
    run = result["runs"][1]
    assert second["p"] == max(run["p_bootstrap"], run["p_randomisation"])  # each system has one seed
    assert f"{metric}_p_bootstrap" not in run
    assert second[f"{metric}_ci"] == run[f"{metric}_ci"]


@pytest.mark.usefixtures("_two_runs")
def test_a_metric_that_the_runs_did_not_compute_is_counted_anew(mean_metric: str) -> None:
    result = of_metric(mean_metric)
    assert result["signatures"].keys() == {"bleu", "chrf", "ter", "mean"}
    assert result["systems"][0]["mean"] > result["systems"][1]["mean"]
    with pytest.raises(UserError, match="metric=maen: not one of bleu, chrf, ter, wer, ser, mean; did you mean 'mean'"):
        of_metric("maen")
