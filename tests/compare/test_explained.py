"""The figures of faithfulness=true in comparisons."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import FIGURES, REFERENCES, UNEXPLAINED, explain, make_run, worsened

from nmt.compare.columns import EXPLAINED
from nmt.compare.pictures import MASKING
from nmt.compare.report import compare_runs, gather, page, tables, write_comparison
from nmt.config.errors import UserError
from nmt.explain.faithfulness import FIGURES as NAMES
from nmt.system.text_table import markdown

QUICK: dict[str, Any] = {"bootstrap_samples": 100, "randomisation_trials": 100, "examples": 1, "sentences": []}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_figure_has_a_column_and_every_order_a_chart() -> None:
    assert tuple(column.key for column in EXPLAINED) == NAMES
    assert set(MASKING) == set(FIGURES["curves"])


def test_all_files_hold_the_figures_and_what_is_missing_is_a_dash() -> None:
    explain(make_run(Path("a"), worsened(8), "attention=luong_dot", "seed=1"))
    explain(make_run(Path("b"), worsened(9), "attention=luong_dot", "seed=2"), tau=0.3, sentences=20)
    explain(make_run(Path("c"), worsened(2), "attention=none"), UNEXPLAINED)
    make_run(Path("d"), worsened(3), "attention=sparsemax")
    printed = write_comparison(["a", "b", "c", "d"], Path("out"), **QUICK)
    (found,) = json.loads(Path("out/comparison.json").read_text())["comparisons"]
    systems = {row["name"]: row for row in found["systems"]}
    assert systems["luong_dot"]["tau"] == pytest.approx(0.4)
    assert systems["luong_dot"]["tau_sd"] == pytest.approx(0.02**0.5, abs=1e-4)
    assert systems["luong_dot"]["aer_saliency"] == pytest.approx(30)
    assert systems["luong_dot"]["faithfulness_sentences"] == 20
    assert systems["luong_dot"]["masking_curves"] == FIGURES["curves"]
    assert systems["none"]["masking_curves"].keys() == {"saliency", "random"}
    assert systems["sparsemax"]["masking_curves"] == {}
    *_, header, _, first, second, third = printed.splitlines()
    assert header.split("  ")[0] == "system"
    rows = {line.split()[0]: line.split()[1:] for line in (first, second, third)}
    assert rows == {
        "luong_dot": ["0.400", "20.0", "30.0", "0.400", "0.300", "0.700", "20"],
        "none": ["-", "-", "30.0", "-", "0.300", "0.700", "60"],
        "sparsemax": ["-"] * 7,
    }
    with Path("out/comparison.csv").open() as file:
        runs = {row["run"]: row for row in csv.DictReader(file)}
    assert (runs["a"]["tau"], runs["a"]["area_random"]) == ("0.5", "0.7")
    assert (runs["c"]["tau"], runs["d"]["area_random"]) == ("", "")
    markdown = Path("out/comparison.md").read_text()
    assert "the smaller against random" in markdown
    assert "What attention explains" in Path("out/index.html").read_text()


def test_without_figures_nothing_mentions_them() -> None:
    make_run(Path("a"), worsened(8))
    comparison = compare_runs(["a"], **QUICK)
    assert "explains" not in tables(comparison, markdown, in_full=True) + page(comparison, {})


@pytest.mark.parametrize(
    "figures",
    [
        3,
        {"sentences": 1},
        FIGURES | {"tau": 1.5},
        FIGURES | {"sentences": 0},
        FIGURES | {"curves": {"random": [1.0, 0.5]}},
    ],
)
def test_what_is_no_figure_is_a_damaged_file(figures: object) -> None:
    explain(make_run(Path("a"), REFERENCES), figures)
    with pytest.raises(UserError, match="a: a file of this run is damaged"):
        gather(["a"], [], "test")
