"""The script that distills: whom its students learn from and go on from, and that nothing is done twice."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TINY
from forks import call_text

SCRIPT = Path(__file__).parents[1] / "scripts" / "distill.py"
pytestmark = pytest.mark.system


def distill(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call_text(SCRIPT, *words, cwd=folder)


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
        (["out", "attention=hard", "--student", ""], "rewarded for what teachers predict"),
        (["out", "seed=1", "--student", "", "--models", "0"], "--models and --jobs must be at least 1"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, tmp_path: Path) -> None:
    done = distill(tmp_path, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())
