"""A finding on runs as training leaves them, and its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import REFERENCES, make_run, worsened

from nmt.compare.report import write_comparison
from nmt.config.errors import UserError

NAME = "bahdanau_2015_figure_2"
QUICK: dict[str, Any] = {"bootstrap_samples": 100, "randomisation_trials": 100, "examples": 0, "sentences": []}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(runs: str = "sweep", finding: str = NAME) -> tuple[dict[str, Any], str]:
    printed = write_comparison([runs], Path("out"), finding=finding, **QUICK)
    result: dict[str, Any] = json.loads(Path("out/finding.json").read_text())
    return result, printed


def make(attention: str, seed: int, every: int, *overrides: str) -> None:
    name = f"sweep/{attention}-{seed}{''.join(overrides)}"
    make_run(Path(name), worsened(every), f"attention={attention}", f"seed={seed}", *overrides)


def test_the_scores_are_those_of_the_comparison() -> None:
    for seed in (1, 2):
        make("none", seed, 1 + seed)
        make("bahdanau", seed, 20 + seed)
    result, printed = checked()
    (comparison,) = json.loads(Path("out/comparison.json").read_text())["comparisons"]
    systems = {row["name"]: row for row in comparison["systems"]}
    runs = {(row["system"], row["seed"]): row["bleu"] for row in comparison["runs"]}
    for model, system in zip(result["models"], ("none", "bahdanau"), strict=True):
        for key in ("bleu", "bleu_sd", "bleu_by_length", "seeds"):
            assert model[key] == systems[system][key]
        assert model["bleu_by_seed"] == {str(seed): runs[system, seed] for seed in (1, 2)}
    higher = result["statements"][3]
    differences = [runs["bahdanau", seed] - runs["none", seed] for seed in (1, 2)]
    assert higher["value"] == pytest.approx(sum(differences) / 2)
    assert higher["low"] < higher["value"] < higher["high"]
    assert higher["seeds"] == [1, 2]
    for text in (printed, Path("out/finding.md").read_text(), Path("out/finding.html").read_text()):
        assert f"{higher['value']:.2f}" in text
        assert result["verdict"] in text
        assert higher["text"] in text


def test_without_a_finding_there_is_no_page_of_one() -> None:
    make("none", 1, 2)
    write_comparison(["sweep"], Path("out"), **QUICK)
    assert not Path("out/finding.html").exists()


def test_buckets_of_lengths_give_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.compare.compare.MIN_BUCKET", 10)
    for seed in (1, 2, 3):
        make("none", seed, 1 + seed)
        make("bahdanau", seed, 20 + seed)
    result, _ = checked()
    assert all(len(model["bleu_by_length"]) > 2 for model in result["models"])
    assert all(check["low"] is not None for check in result["statements"])
    assert "Here: BLEU by source length" in Path("out/finding.html").read_text()


@pytest.mark.parametrize(("every", "verdict"), [((1, 30), "reproduced here"), ((4, 6), "undecided")])
def test_one_seed_is_tested_like_the_comparison_tests_it(every: tuple[int, int], verdict: str) -> None:
    make("none", 1, every[0])
    make("bahdanau", 1, every[1])
    result, _ = checked()
    (comparison,) = json.loads(Path("out/comparison.json").read_text())["comparisons"]
    (row,) = (row for row in comparison["systems"] if row["name"] == "none")
    higher = result["statements"][3]
    assert higher["verdict"] == verdict
    assert f"(p = {row['p_raw']:.3f})" in higher["reason"]
    assert [check["verdict"] for check in result["statements"][:3]] == ["undecided"] * 3


def test_missing_runs_and_seeds_are_named() -> None:
    for seed in (1, 2, 3):
        make("luong_dot", seed, 10 + seed)
        make("luong_location", seed, 2 + seed)
    make("luong_general", 1, 5)
    make("luong_general", 2, 6)
    result, _ = checked(finding="luong_2015_table_4")
    dot, general, local, best = result["statements"]
    assert (dot["seeds"], dot["value"] is not None) == ([1, 2, 3], True)
    assert general["reason"].endswith("general has no finished run with seed 3")
    assert local["reason"] == (
        "no finished run with attention=luong_local_p; no finished run with attention=luong_local_m"
    )
    assert best["value"] is None
    assert result["verdict"] == "undecided"
    assert [model["seeds"] for model in result["models"]] == [[1, 2, 3], [1, 2, 3], [1, 2], [], []]


def test_several_systems_of_one_model_are_not_mixed() -> None:
    for layers in (1, 2):
        make("none", 1, 2, f"decoder.layers={layers}")
    make("bahdanau", 1, 9, "decoder.layers=1")
    result, _ = checked()
    assert result["statements"][3]["reason"] == (
        "several systems have attention=none (none layers=1, none layers=2); compare one of them"
    )


def test_several_runs_of_one_seed_are_not_mixed() -> None:
    make("none", 1, 2)
    make("none", 1, 3, "threads=2")
    make("bahdanau", 1, 9)
    result, _ = checked()
    assert result["statements"][3]["reason"] == (
        "several runs have attention=none and seed=1 (sweep/none-1, sweep/none-1threads=2); compare one of them"
    )


def test_a_finding_needs_one_test_set_and_a_name() -> None:
    make("none", 1, 2)
    make("bahdanau", 1, 2, "evaluation.lowercase=true")
    with pytest.raises(UserError, match=f"finding={NAME}: the runs have several test sets"):
        write_comparison(["sweep"], Path("out"), finding=NAME, separate_incomparable=True, **QUICK)
    with pytest.raises(UserError, match="finding=bahdanau: not one of"):
        write_comparison(["nowhere"], Path("out"), finding="bahdanau", **QUICK)
    assert not Path("out").exists()
    assert len(REFERENCES) == 60
