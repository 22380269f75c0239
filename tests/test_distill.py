"""The script that distills: whom its students learn from and go on from, and that nothing is done twice."""

import argparse
import json
import subprocess
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
import yaml
from conftest import TINY, script, values_of
from forks import call_text

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig

SCRIPT = Path(__file__).parents[1] / "scripts" / "distill.py"
pytestmark = pytest.mark.system


def distill(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call_text(SCRIPT, *words, cwd=folder)


@pytest.mark.slow
def test_each_student_goes_on_from_one_teacher_and_learns_from_all(tmp_path: Path) -> None:
    words = ["out", *TINY, "training.max_steps=3", "search.max_length=8", "--student", "training.max_steps=2"]
    done = distill(tmp_path, *words, "--models", "2", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    for seed in ("1", "2"):
        teacher, student = out / "teacher" / seed, out / "student" / seed
        first, then = (yaml.safe_load((run / "config.yaml").read_text()) for run in (teacher, student))
        assert (first["seed"], then["seed"]) == (int(seed), int(seed))
        assert (first["training"]["max_steps"], then["training"]["max_steps"]) == (3, 2)
        assert first["objective"] == {"kind": "likelihood"}
        assert then["objective"]["teachers"] == [str(out / "teacher" / "1"), str(out / "teacher" / "2")]
        assert then["training"]["start_from"] == str(teacher)
        assert "objective=distillation" in json.loads((student / "manifest.json").read_text())["starts"][0]["overrides"]
    one, two = (torch.load(out / "teacher" / seed / "checkpoints" / "last.pt", weights_only=True) for seed in "12")
    assert not torch.equal(one["model"]["output.bias"], two["model"]["output.bias"])
    (compared,) = json.loads((out / "comparison" / "comparison.json").read_text())["comparisons"]
    assert compared["split"] == "validation"
    assert sorted((system["name"].split()[0], len(system["seeds"])) for system in compared["systems"]) == [
        ("objective=distillation", 2),
        ("objective=likelihood", 2),
    ]
    other = distill(tmp_path, *words, "--models", "1")
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "out: has students of other --student or --models (out/distill.json); move out/student away" in other.stderr
    times = {path: path.stat().st_mtime_ns for path in out.rglob("last.pt")}
    assert len(times) == 4
    again = distill(tmp_path, *words, "--models", "2")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["out", "seed=1"], "the following arguments are required: --student"),
        (["out", "sead=1", "--student", ""], "error: sead: unknown key; did you mean"),
        (["out", "seed=1", "--student", "objective.shar=1"], "error: objective.shar: unknown key; did you mean"),
        (["out", "seed=1", "--student", "a='b"], 'error: --student "a=\'b": no closing quotation'),
        (["out", *TINY, "--student", "encoder.hidden=8"], "(encoder.hidden is 16 there, 8 here); with"),
        (
            ["out", "seed=1", "--student", "tokenizer.vocab_size=900"],
            "error: --student: another corpus gives another",
        ),
        (["out", "attention=hard", "--student", ""], "objective.kind=distillation gives no reward"),
        (["out", "seed=1", "--student", "", "--models", "0"], "--models and --jobs must be at least 1"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, tmp_path: Path) -> None:
    done = distill(tmp_path, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def module() -> ModuleType:
    return script("distill")


def test_students_may_begin_anew_and_have_a_tokenizer_of_their_teachers(module: ModuleType) -> None:
    teacher = validated(TrainConfig, values_of("train", TINY))

    def refuse(*own: str, tiny: list[str] = TINY) -> None:
        values = values_of("train", [*tiny, "training.start_from=T", *own])
        module.check_students(teacher, validated(TrainConfig, values))

    refuse("decoder.dropout=0.3", "encoder.zoneout=0.2", "tokenizer.sampling=0.1", "training.batch_tokens=100")
    refuse("training.start_from=null", "encoder.hidden=8")
    with pytest.raises(UserError, match=r"encoder.hidden is 16 there, 8 here"):
        refuse("encoder.hidden=8")
    theirs = ["tokenizer=file", "tokenizer.source_model=out/teacher/1/tokenizer.model"]
    refuse("data.train_size=100", *theirs, tiny=[word for word in TINY if not word.startswith("tokenizer.")])
    with pytest.raises(UserError, match="another corpus gives another tokenizer"):
        refuse("data.train_size=100")


def test_a_folder_keeps_to_what_was_begun_there(module: ModuleType, tmp_path: Path) -> None:
    asked = {"overrides": ["seed=1"], "models": 2, "student": ["optimizer.lr=1"]}
    module.begin(tmp_path, asked)
    module.begin(tmp_path, {**asked, "models": 3, "student": []})  # none has begun
    with pytest.raises(UserError, match=r"was started with other values .*; give another folder$"):
        module.begin(tmp_path, {**asked, "overrides": ["seed=2"]})
    (tmp_path / "student" / "1").mkdir(parents=True)
    (tmp_path / "student" / "1" / "config.yaml").touch()
    module.begin(tmp_path, {**asked, "models": 3, "student": []})
    for other in ({"models": 2, "student": []}, {"models": 3, "student": ["a"]}):
        with pytest.raises(UserError, match=r"has students of other --student or --models .*; move .*/student away$"):
            module.begin(tmp_path, {**asked, **other})


def test_a_failure_is_told_and_nothing_is_begun_after_it(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = []

    def finish(run: Path, _: list[str]) -> None:
        begun.append(run)
        if len(begun) == 2:
            raise UserError(f"{run}: failed")

    monkeypatch.setattr(module, "finish", finish)
    options = argparse.Namespace(directory=tmp_path / "out", overrides=TINY, student="", models=3, jobs=1)
    with pytest.raises(UserError, match=r"teacher/2: failed$"):
        module.distill(options)
    assert begun == [tmp_path / "out" / "teacher" / seed for seed in "12"]
    assert "teacher/2: failed; runs that have started continue" in "".join(capsys.readouterr())


def test_who_interrupts_is_told_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(options: argparse.Namespace) -> int:
        assert (options.directory, options.overrides, options.models) == (Path("out"), ["seed=1"], 3)
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["distill.py", "out", "seed=1"])
    runs = script("runs")
    assert runs.run_script(work, runs.run_parser(None, 3, "teachers")) == 130
    assert capsys.readouterr().err == "interrupted: the same command resumes\n"


def test_work_that_would_begin_after_a_failure_raises_that_failure() -> None:
    """Threads may reach the work out of order, so the first error that is seen must be the user's."""
    failures = [UserError("teacher/2: failed")]
    with pytest.raises(UserError, match="teacher/2: failed"), script("runs").reporting_failure(failures, Mock()):
        pytest.fail("begun")
