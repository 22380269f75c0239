"""nmt-compare ranks and tests by the chosen metric."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import REFERENCES, make_run, worsened

from nmt.compare.report import compare_runs, tables
from nmt.config.errors import UserError
from nmt.system.text_table import terminal

QUICK: dict[str, Any] = {"bootstrap_samples": 100, "randomisation_trials": 100, "examples": 2, "sentences": []}
# BLEU and chrF prefer WORDS, TER prefers ORDER.
ORDER = worsened(1)
WORDS = [line if n % 4 else "ganz andere wörter" for n, line in enumerate(REFERENCES)]


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("order"), ORDER)
    make_run(Path("words"), WORDS, "encoder.layers=2")


def compared(metric: str | None = None, **settings: str) -> dict[str, Any]:
    return compare_runs(["order", "words"], metric=metric, **QUICK, **settings)


@pytest.mark.parametrize(("metric", "first"), [("bleu", "words"), ("chrf", "words"), ("ter", "order")])
def test_the_metric_ranks_and_its_tests_are_shown(metric: str, first: str) -> None:
    result = compared(metric)
    assert result["metric"] == metric
    assert result["runs"][0]["run"] == first
    best, second = result["systems"]
    assert result["baseline"] == best["name"]
    assert (best[metric] < second[metric]) == (metric == "ter")
    run = result["runs"][1]
    assert second["p"] == max(run["p_bootstrap"], run["p_randomisation"])  # each system has one seed
    assert f"{metric}_p_bootstrap" not in run
    assert second[f"{metric}_ci"] == run[f"{metric}_ci"]
    if metric == "ter":  # gives the tests that BLEU's tables show for TER
        plain = compared(baseline="order")
        (same,) = (row for row in plain["runs"] if row["run"] == run["run"])
        assert (run["p_bootstrap"], run["p_randomisation"]) == (same["ter_p_bootstrap"], same["ter_p_randomisation"])
        assert run["bleu_p_bootstrap"] == same["p_bootstrap"]


def test_the_table_begins_with_the_signature_of_the_metric() -> None:
    assert "chrF nrefs:1|" in tables(compared("chrf"), terminal).splitlines()[0]


def test_a_metric_that_the_runs_did_not_compute_is_counted_anew(mean_metric: str) -> None:
    result = compared(mean_metric)
    assert result["signatures"].keys() == {"bleu", "chrf", "ter", "mean"}
    assert result["systems"][0]["mean"] > result["systems"][1]["mean"]
    with pytest.raises(UserError, match="metric=maen: not one of bleu, chrf, ter, wer, ser, mean; did you mean 'mean'"):
        compared("maen")
