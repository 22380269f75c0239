"""Tuning the search: what it prints is what nmt-evaluate would, and the test set stays unseen."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, script, values_of
from forks import call_text

from nmt.config.compose import merge_search, validated
from nmt.config.overrides import override_values
from nmt.config.schema import Beam, Evaluation, SearchLimits, TrainConfig
from nmt.evaluate.evaluation import evaluate, score_settings
from nmt.model.checkpoints import read_checkpoint, save_checkpoint
from nmt.system.run import RunDirectory
from nmt.training.job import train
from nmt.translate.translator import Translator

SCRIPT = Path(__file__).parents[2] / "scripts" / "tune_search.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = tmp_path_factory.mktemp("tune") / "run"
    config = validated(TrainConfig, values_of("train", [*TINY, "data.train_size=400", "search.max_length=12"]))
    assert train(config, directory, []) == 0
    for path in (directory / "data").glob("test.*"):
        path.unlink()
    return RunDirectory(directory)


def tune(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return call_text(SCRIPT, *words, cwd=folder)


def another(run: RunDirectory, path: Path) -> Path:
    """A run with other weights."""
    shutil.copytree(run.path, path)
    best = path / "checkpoints" / "best.safetensors"
    checkpoint = read_checkpoint(best)
    checkpoint["model"] = {name: 1.5 * weights for name, weights in checkpoint["model"].items()}
    save_checkpoint(best, checkpoint)
    return path


@pytest.mark.parametrize("members", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_table_is_that_of_evaluations_without_the_test_set(run: RunDirectory, members: int, tmp_path: Path) -> None:
    runs = [run.path]
    if members == 2:
        runs.append(another(run, tmp_path / "another"))
    before = sorted(run.path.rglob("*"))
    done = tune(tmp_path, *runs, "--beams", "4", "1", "--average", "0.0", "2.0", "--gnmt", "1.0", "--coverage", "5")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("tune_search.json")
    assert path.is_relative_to(tmp_path / "outputs" / "tune_search")
    found = json.loads(path.read_text())
    rows = found["settings"]
    keys = ("beam_size", "length_penalty", "alpha", "coverage_penalty")
    plain = [tuple(row[key] for key in keys) for row in rows if row["coverage_penalty"] == 0]
    penalties = [("none", None), ("average", 0.0), ("average", 2.0), ("gnmt", 1.0)]
    assert set(plain) == {(1, "none", None, 0.0), *((4, *penalty, 0.0) for penalty in penalties)}
    (covered,) = (row for row in rows if row["coverage_penalty"] == 5.0)
    assert tuple(covered[key] for key in keys) == (*plain[0][:3], 5.0)  # with the best of the others
    assert [row["bleu"] for row in rows] == sorted((row["bleu"] for row in rows), reverse=True)
    assert len({row["brevity_ratio"] for row in rows}) > 1  # the settings reach the search
    sources, references, _ = run.held_out("validation")
    settings = score_settings(Evaluation(tokenize="auto", lowercase=False), "fr")
    for row in rows:
        given = dict(word.removeprefix("search.").split("=") for word in row["override"].split())
        search = {key: row[key] for key in keys}
        assert {key: str(value) for key, value in search.items() if value is not None} == given
        again = evaluate(Translator.load(runs, search=search), sources, references, settings, ("bleu", "chrf"))
        assert (row["bleu"], row["chrf"]) == pytest.approx((again.scores.bleu, again.scores.chrf))
        words = [sum(len(line.split()) for line in side) for side in (again.hypotheses, references)]
        assert row["brevity_ratio"] == pytest.approx(words[0] / words[1], rel=0.1)  # but for sacreBLEU's tokenizer
        assert row["seconds"] > 0
    assert found["best"] == rows[0]["override"]
    named = f"run={runs[0]}" if members == 1 else f"'run=[{runs[0]},{runs[1]}]'"
    assert found["command"] == f"nmt-translate {named} {found['best']} < input > output"
    assert found["command"] in done.stdout
    assert path.with_suffix(".md").read_text() in done.stdout
    assert sorted(run.path.rglob("*")) == before


def test_a_run_of_another_search_is_told_to_use_a_beam(run: RunDirectory, tmp_path: Path) -> None:
    config = run.config.read_text()
    values = config.replace("kind: beam", "kind: greedy")
    for key in [key for key in Beam.model_fields if key != "kind" and key not in SearchLimits.model_fields]:
        values = "\n".join(line for line in values.splitlines() if not line.startswith(f"  {key}:"))
    run.config.write_text(values)
    try:
        done = tune(tmp_path, run.path, "--beams", "2", "--average", "--gnmt", "--coverage", "--output", "here")
        trained = Translator.load(run.path)
    finally:
        run.config.write_text(config)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "here" / "tune_search.json").read_text())
    assert found["best"] == (
        "search.kind=beam search.alpha=0.0 search.stop=beam search.beam_size=2 search.length_penalty=none "
        "search.coverage_penalty=0.0"
    )
    taken = merge_search(trained.search, override_values(found["best"].replace("search.", "").split()))
    assert isinstance(taken, Beam)
    assert (taken.beam_size, taken.length_penalty) == (2, "none")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--beams", "0"], "search.beam_size=0: input should be greater than 0"),
        (["--coverage", "-1"], "search.coverage_penalty=-1.0"),
        (["--output", "{run}/config.yaml"], "/config.yaml: is a file"),
        (["--output", "{run}"], "run: holds files other than the results of tune_search"),
    ],
)
def test_a_mistake_is_told_before_anything_is_translated(
    run: RunDirectory, tmp_path: Path, words: list[str], told: str
) -> None:
    before = sorted(run.path.rglob("*"))
    done = tune(tmp_path, run.path, *(word.format(run=run.path) for word in words))
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert "sent/s" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert sorted(run.path.rglob("*")) == before


def test_an_interruption_leaves_what_was_tried(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("tune_search")
    real, calls = module.evaluate, []

    def interrupted(*given: Any) -> Any:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module, "evaluate", interrupted)
    monkeypatch.setattr(sys, "argv", ["tune_search.py", str(run.path), "--beams", "1", "2", "--output", str(tmp_path)])
    module.main()
    (row,) = json.loads((tmp_path / "tune_search.json").read_text())["settings"]
    assert row["beam_size"] == 1
    assert "interrupted: 1 of" in capsys.readouterr().err
    calls[:] = [1]
    with pytest.raises(SystemExit, match="130"):
        module.main()


def test_coverage_penalties_are_tried_with_the_best_of_the_grid(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, bleu = script("tune_search"), {1: 10.0, 3: 30.0, 2: 20.0}

    def measure(self: Any, setting: dict[str, Any], bar: object) -> None:  # noqa: ANN401
        self.rows.append(
            {**setting, "bleu": bleu[setting["beam_size"]], "chrf": 0.0, "brevity_ratio": 1.0, "seconds": 1.0}
            | {"override": ""}
        )
        self.rows.sort(key=lambda row: -row["bleu"])

    monkeypatch.setattr(module.Tuning, "measure", measure)
    words = ["tune_search.py", str(run.path), "--beams", "1", "3", "2", "--average", "1.5", "--gnmt", "--no-none"]
    monkeypatch.setattr(sys, "argv", [*words, "--coverage", "0.1", "--output", str(tmp_path)])
    module.main()
    rows = json.loads((tmp_path / "tune_search.json").read_text())["settings"]
    (covered,) = (row for row in rows if row["coverage_penalty"] > 0)
    assert [covered[key] for key in ("beam_size", "length_penalty", "alpha")] == [3, "average", 1.5]
