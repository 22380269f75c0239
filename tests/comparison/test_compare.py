"""Ranking, means over seeds, tests against the baseline, and examples."""

import statistics
from pathlib import Path
from typing import Any

import pytest
from made_runs import REFERENCES, SOURCES, make_run, worsened

from nmt.comparison.compare import compare, group
from nmt.comparison.entry import Entry, HeldOut, read_run
from nmt.config.errors import UserError
from nmt.metrics.bleu import ScoreSettings, score, sentence_bleu
from nmt.metrics.significance import Significance

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
    return score(OUTPUTS[name, seed], REFERENCES, SETTINGS, ("bleu",)).bleu


def test_the_best_mean_is_first_and_the_baseline() -> None:
    found = compared(entries()[::-1])
    assert [(row["rank"], row["name"], row["seeds"]) for row in found["systems"]] == [
        (1, "good", [1, 2]),
        (2, "bad", [1, 2]),
    ]
    assert found["baseline"] == "good"
    for row in found["systems"]:
        values = [bleu(row["name"], seed) for seed in (1, 2)]
        assert row["bleu"] == pytest.approx(statistics.mean(values), abs=1e-3)
        assert row["bleu_sd"] == pytest.approx(statistics.stdev(values), abs=1e-3)
    assert found["signature"] == score(REFERENCES, REFERENCES, SETTINGS).signature
    assert (found["sentences"], found["split"]) == (60, "test")


def test_a_run_is_tested_against_the_baselines_run_of_its_seed() -> None:
    found = compared(baseline="good")
    significance = Significance(REFERENCES, SETTINGS, 200, 200)
    runs = {row["run"]: row for row in found["runs"]}
    for seed in (1, 2):
        _, expected = significance(OUTPUTS["good", seed], [OUTPUTS["bad", seed]])
        row = runs[f"bad{seed}"]
        assert row["baseline_run"] == f"good{seed}"
        assert row["p_bootstrap"] == expected["bleu"].p_bootstrap
        assert row["p_randomisation"] == expected["bleu"].p_randomisation
        for metric in ("chrf", "ter"):
            assert row[f"{metric}_p_bootstrap"] == expected[metric].p_bootstrap
            assert row[f"{metric}_p_randomisation"] == expected[metric].p_randomisation
        assert row["bleu_ci"] == pytest.approx(expected["bleu"].interval, abs=1e-3)
        assert runs[f"good{seed}"]["p_bootstrap"] is None
    assert len({runs[f"bad{seed}"]["p_bootstrap"] for seed in (1, 2)}) == 2
    bad = found["systems"][1]
    assert bad["p_bootstrap"] == max(runs[f"bad{seed}"]["p_bootstrap"] for seed in (1, 2))
    assert bad["p_randomisation"] == max(runs[f"bad{seed}"]["p_randomisation"] for seed in (1, 2))
    assert found["systems"][0]["p_bootstrap"] is None


def test_seeds_that_differ_in_opposite_directions_are_not_significant() -> None:
    others = {("mixed", 1): worsened(2), ("mixed", 2): worsened(10)}
    systems = {("plain", 1): worsened(10), ("plain", 2): worsened(2), **others}
    given = [Entry(f"{name}{seed}", lines, seed, name, {"attention": name}) for (name, seed), lines in systems.items()]
    found = compared(given, baseline="plain")
    significant = [row["p_bootstrap"] for row in found["runs"] if row["run"].startswith("mixed")]
    assert max(significant) < 0.05
    (mixed,) = (row for row in found["systems"] if row["name"] == "mixed")
    assert (mixed["p_bootstrap"], mixed["p_randomisation"]) == (1.0, 1.0)


def test_without_its_seed_in_the_baseline_a_run_meets_the_first() -> None:
    found = compared([*entries(), Entry("their system", worsened(4))], baseline="bad")
    runs = {row["run"]: row["baseline_run"] for row in found["runs"]}
    assert found["baseline"] == "bad"
    assert runs == {"good1": "bad1", "good2": "bad2", "bad1": None, "bad2": None, "their system": "bad1"}
    assert next(row for row in found["systems"] if row["name"] == "their system")["bleu_sd"] is None


def test_one_output_alone_has_scores_and_an_interval() -> None:
    found = compared(entries()[:1])
    assert found["systems"][0]["bleu_sd"] is None
    assert found["runs"][0]["bleu_ci"] > 0


def test_bleu_by_length_has_the_same_buckets_for_all() -> None:
    good, bad = compared()["systems"]
    assert [part["words"] for part in good["bleu_by_length"]] == [part["words"] for part in bad["bleu_by_length"]]
    assert sum(part["sentences"] for part in good["bleu_by_length"]) == 60


def test_costs_and_curves_are_means_of_what_is_known(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), worsened(n + 2), f"seed={n}") for n in (1, 2)]
    (tmp_path / "2" / "metrics.jsonl").write_text('{"epoch": 1.0, "validation/bleu": 30.0}\n')
    (tmp_path / "2" / "manifest.json").write_text('{"starts": [{}], "training": {"seconds": 20, "epochs": 1}}')
    (row,) = compared([read_run(run, "test")[0] for run in runs])["systems"]
    assert (row["seconds"], row["epoch_seconds"], row["parameters"]) == (40.0, 25.0, 1234.0)
    assert (row["tokens_per_second"], row["sentences_per_second"]) == (1000.0, 50.0)
    assert row["aer"] == pytest.approx(50.0)
    assert row["curve"] == [(1.0, 20.0), (2.0, 20.0)]


def test_half_of_the_examples_differ_most_and_half_are_of_all_lengths() -> None:
    numbers = [row["number"] for row in compared(examples=6)["examples"]]
    assert len(numbers) == 6
    scores = [sentence_bleu(OUTPUTS[name, 1], REFERENCES, SETTINGS) for name in ("good", "bad")]
    spread = [abs(good - bad) for good, bad in zip(*scores, strict=True)]
    assert sorted(spread[number - 1] for number in numbers)[-3:] == sorted(spread)[-3:]
    lengths = [len(SOURCES[number - 1].split()) for number in numbers]
    assert min(lengths) == min(len(source.split()) for source in SOURCES)
    assert max(lengths) == max(len(source.split()) for source in SOURCES)
    assert len(compared(examples=1000)["examples"]) == 60
    assert compared(examples=0)["examples"] == []


def test_an_example_holds_every_system_with_its_alignment(tmp_path: Path) -> None:
    run, _ = read_run(make_run(tmp_path / "a", worsened(2)), "test")
    found = compared([run, Entry("their system", worsened(4))], sentences=[14])
    (example,) = found["examples"]
    assert (example["number"], example["source"], example["reference"]) == (14, SOURCES[13], REFERENCES[13])
    by_system = {each["system"]: each for each in example["translations"]}
    assert by_system["bahdanau"]["text"] == worsened(2)[13]
    assert by_system["bahdanau"]["alignment"]["weights"] == [[90, 10], [5, 95]]
    assert by_system["their system"]["alignment"] is None
    assert by_system["their system"]["bleu"] == 100.0


def test_an_example_beyond_the_last_is_refused() -> None:
    with pytest.raises(UserError, match="sentences=61: the test set has 60"):
        compared(sentences=[61])


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        "[1]",
        '{"source": ["a"], "target": ["b"]}',
        '{"source": ["a"], "target": ["b"], "weights": [[1, 2]]}',
        '{"source": ["a"], "target": ["b"], "weights": [["x"]]}',
        '{"source": ["a"], "target": ["b"], "weights": [[NaN]]}',
        '{"source": ["a"], "target": ["b"], "weights": [[1e999]]}',
        '{"source": ["a"], "target": ["b"], "weights": [[-1]]}',
        '{"source": ["\\ud800"], "target": ["b"], "weights": [[1]]}',
        '{"source": 3, "target": ["b"], "weights": [[1]]}',
    ],
)
def test_word_weights_that_are_none_are_refused_with_their_line(line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", worsened(2))
    (run / "alignments" / "test.words.jsonl").write_text(f"{line}\n" * 60)
    with pytest.raises(UserError, match=r"test\.words\.jsonl, line 3: is no attention between words"):
        compared([read_run(run, "test")[0]], sentences=[3])


def test_word_weights_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", worsened(2))
    (run / "alignments" / "test.words.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"test\.words\.jsonl: has 1 lines for 60 sentences"):
        compared([read_run(run, "test")[0]])
