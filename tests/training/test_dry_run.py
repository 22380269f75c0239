"""nmt-train --dry-run reports the errors and the cost of a run, and leaves no files behind."""

import importlib
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
from conftest import TINY
from forks import call_text

from nmt.training import dry_run as module
from nmt.training import job
from nmt.training.trainer import Trainer

PRINTED = ["model", "memory", "update", "utilisation", "epoch", "validation", "run", "dry run"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty working directory. Temporary files go to `tmp` beside it, a cache would be at `cache`."""
    importlib.import_module("torch._dynamo")  # importing makes a temporary folder; forks then do not
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("NMT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "TIMED_SECONDS", 0.1)
    return tmp_path / "home"


def left_in(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home.parent)) for path in home.parent.rglob("*"))


@pytest.mark.system
def test_it_tells_what_a_run_would_take_and_leaves_nothing(home: Path) -> None:
    words = [*TINY, "validation.unit=steps", "validation.every=7", "search.max_ratio=0.1"]
    done = call_text("nmt-train", "--dry-run", *words, cwd=home)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == PRINTED
    assert left_in(home) == ["home", "tmp"]
    assert "corpus: en to fr" in done.stderr
    assert "search.m" not in done.stderr  # no advice about the lengths that the timed validation forces
    assert re.fullmatch(r"[\d.]+ s, [\d,]+ target tokens per second", lines["update"])
    told = re.search(r"\(updates: (\d+), epochs: 1, validations: (\d+), and the final evaluation\)$", lines["run"])
    assert told
    updates, validations = map(int, told.groups())
    assert validations == -(-updates // 7) > 1  # one more after the last update


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "seed=1,2"], "--dry-run: tries a single run, but this is a sweep; give each key one value, without -m"),
        (["run=somewhere"], "--dry-run: tries a new run, but run= resumes one"),
        (["--dryrun"], "unrecognized arguments: --dryrun; did you mean '--dry-run'?"),
    ],
)
def test_what_it_is_not_for_is_refused_in_a_line(words: list[str], told: str, home: Path) -> None:
    done = call_text("nmt-train", *(["--dry-run"] if "--dryrun" not in words else []), *words, cwd=home)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"nmt-train: error: {told}")
    assert left_in(home) == ["home", "tmp"]


@pytest.mark.system
@pytest.mark.parametrize(
    ("number", "owner", "name"),
    [
        (signal.SIGTERM, Trainer, "update"),
        pytest.param(signal.SIGINT, job, "prepare", marks=pytest.mark.slow),  # while the corpus is prepared
    ],
)
def test_a_signal_leaves_nothing_either(
    number: int, owner: object, name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(owner, name)

    def signalled(*given: object) -> object:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        return real(*given)

    monkeypatch.setattr(owner, name, signalled)
    assert call_text("nmt-train", "--dry-run", *TINY, cwd=home).returncode == 128 + number
    assert left_in(home) == ["home", "tmp"]
