"""The monitored score decides about the best checkpoint, patience, the plateau schedule and the result of a sweep."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_config
from fitting import fitted, metrics, same, state, weights

from nmt.config.errors import UserError
from nmt.evaluate.metrics import METRICS, WITHOUT_TEXT
from nmt.model.seq2seq import Seq2Seq
from nmt.training.job import train
from nmt.training.stopping import EarlyStopping

HIGHER_IS_BETTER = {"bleu": True, "chrf": True, "ter": False, "wer": False, "loss": False, "aer": False}
RUN = ["training.max_steps=4", "validation.unit=steps", "validation.every=1", "schedule=plateau", "schedule.patience=0"]


def validations(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "validation/bleu" in line]


def test_every_monitor_has_a_direction() -> None:
    for monitor, higher in HIGHER_IS_BETTER.items():
        stopping = EarlyStopping(monitor, None)
        found = [stopping.update({monitor: score}, step) for step, score in enumerate([0.5, 0.6, 0.4])]
        assert found == [True, higher, not higher], monitor


@pytest.mark.parametrize("monitor", ["ter", "chrf"])
def test_best_checkpoint_patience_and_plateau_follow_the_monitored_score(
    monitor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitored scores are made up; BLEU is their negative, to show that it does not decide."""
    sign = 1 if HIGHER_IS_BETTER[monitor] else -1
    told = iter([0.5, 0.7, 0.6, 0.6])

    def validation(_: object) -> tuple[dict[str, float], list[Any]]:
        score = next(told)
        return {"loss": 1.0, "perplexity": 1.0, "bleu": -score, monitor: sign * score}, []

    monkeypatch.setattr("nmt.training.validation.Validator.__call__", validation)
    config = tiny_config(
        *RUN, f"validation.monitor={monitor}", "validation.patience=2", "training.max_steps=9", "training.log_every=99"
    )
    fitted(config, tmp_path / "run")
    last = state(tmp_path / "run")
    assert (last["step"], last["stopping"]["best_step"], state(tmp_path / "run", "best")["step"]) == (4, 2, 2)
    assert last["schedule"]["reduction"] < 1
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["training"][f"best_{monitor}"] == sign * 0.7
    (logged,) = [line["step"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert logged == 4  # the updates before the stop are logged
    assert f"stopped early: {monitor} has not improved" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.system
def test_monitored_scores_are_those_of_the_final_evaluation(tmp_path: Path, mean_metric: str) -> None:
    """The choice of the monitored score does not change training; a metric needs no more than its entry in METRICS."""
    runs = {}
    for monitor in ("bleu", mean_metric):
        # With one step, the last validation measures the best checkpoint.
        words = f"validation.monitor={monitor}", "evaluation.metrics=[bleu,chrf,mean]"
        assert train(tiny_config("training.max_steps=1", *words), tmp_path / monitor) == 0
        runs[monitor] = weights(tmp_path / monitor)
        (line,) = validations(tmp_path / monitor)
        results = json.loads((tmp_path / monitor / "results.json").read_text())["validation"]
        assert results["signatures"].keys() == {"bleu", "chrf", "mean"}
        known = {name.partition("/")[2] for name in line if name.startswith("validation/")}
        assert known & {*METRICS, *WITHOUT_TEXT} == {"loss", "aer", "bleu", "chrf", "mean"}
        for name in known & results.keys():
            assert line[f"validation/{name}"] == pytest.approx(results[name], abs=1e-4), name
        assert same(runs[monitor], runs["bleu"])
    (line,) = validations(tmp_path / mean_metric)
    assert f"  mean score {line['validation/mean']:.4f}" in (tmp_path / mean_metric / "train.log").read_text()


@pytest.mark.parametrize(
    ("key", "word", "known", "near"),
    [
        ("validation.monitor", "blue", [*METRICS, *WITHOUT_TEXT], "bleu"),
        ("evaluation.metrics", "tre", METRICS, "ter"),
    ],
)
def test_an_unknown_metric_is_named_before_anything_is_written(
    key: str, word: str, known: Collection[str], near: str, tmp_path: Path
) -> None:
    given = word if "monitor" in key else f"[bleu,{word}]"
    message = f"{key}={word}: not one of {', '.join(known)}; did you mean '{near}'?"
    with pytest.raises(UserError, match=re.escape(message)):
        train(tiny_config(f"{key}={given}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_validation_translates_and_measures_by_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("training.max_steps=3", "validation.unit=steps", "validation.every=3", "training.log_every=9")
    fitted(config, tmp_path / "whole")
    for name in ("encode", "force", "forward"):
        real = getattr(Seq2Seq, name)

        def limited(self: Seq2Seq, *given: Any, _real: Any = real, **more: Any) -> Any:  # noqa: ANN401
            if not self.training and len(given[0]) > 3:
                raise torch.OutOfMemoryError("out of memory")
            return _real(self, *given, **more)

        monkeypatch.setattr(Seq2Seq, name, limited)
    fitted(config, tmp_path / "halved")
    torch.testing.assert_close(weights(tmp_path / "halved", "best"), weights(tmp_path / "whole", "best"))
