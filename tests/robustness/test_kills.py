"""A run that is killed at any moment and started again ends with the same bits as an uninterrupted run."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import TINY, run_config
from forks import Work, ended, forked, killed_after
from kills import curves, differing, outcome, watched

pytestmark = [pytest.mark.slow, pytest.mark.system]  # tests/training has fast tests of interruptions within one process
# A run with validations, checkpoints between them, a schedule that has a state, dropout and sampled segmentations.
RECIPE = [
    *(*TINY, "training.max_epochs=2", "training.log_every=3", "training.checkpoint_every=5", "training.ema_decay=0.9"),
    *("tokenizer.sampling=0.1", "validation.unit=steps", "validation.every=7", "validation.samples=1"),
]


class Scene(NamedTuple):
    """A folder, and the training with RECIPE that runs in it."""

    folder: Path
    run: Path
    work: Work
    output: Path


def scene(folder: Path) -> Scene:
    folder.mkdir()
    config = run_config(*RECIPE, f"data.cache_dir={folder / 'cache'}").with_absolute_paths()

    def work() -> int:
        from nmt.training.job import train

        torch.set_num_threads(1)
        return train(config, folder / "run", [])

    return Scene(folder, folder / "run", work, folder.with_suffix(".txt"))


class Whole(NamedTuple):
    """The results of the uninterrupted run."""

    outcome: dict[str, object]
    curves: dict[str, list[tuple[int, bytes]]]
    changes: int  # number of changes of the disk
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    made = scene(tmp_path_factory.mktemp("whole") / "scene")
    count, began = made.folder.with_suffix(".count"), time.monotonic()
    work = watched(made.work, made.folder, lambda number: count.write_text(str(number)))
    assert ended(forked(work, made.output)) == 0, made.output.read_text()
    return Whole(outcome(made.run), curves(made.run), int(count.read_text()), time.monotonic() - began)


def same(made: Scene, whole: Whole) -> None:
    expected = {**whole.outcome, "config.yaml": outcome(made.run)["config.yaml"]}  # names another cache folder
    assert differing(expected, outcome(made.run)) == []
    assert curves(made.run) == whole.curves
    assert not list(made.folder.rglob("*.part"))
    printed = made.output.read_text()
    assert "Traceback" not in printed, printed


@pytest.mark.parametrize("part", range(8))
def test_killed_before_each_change_of_the_disk(part: int, whole: Whole, tmp_path: Path) -> None:
    for change in range(1 + part, whole.changes + 1, 8):
        made = scene(tmp_path / f"scene-{change}")

        def kill(number: int, last: int = change) -> None:
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)

        assert ended(forked(watched(made.work, made.folder, kill), made.output)) in {-9, 0}, made.output.read_text()
        assert ended(forked(made.work, made.output)) == 0, made.output.read_text()
        same(made, whole)


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments(seed: int, whole: Whole, tmp_path: Path) -> None:
    """Kills at least ten times per seed; most runs are killed more than once."""
    draw = random.Random(seed)
    kills = runs = 0
    while kills < 10:
        made = scene(tmp_path / f"scene-{runs}")
        status = None
        while status != 0:
            status = killed_after(made.work, draw.uniform(0, whole.seconds), made.output)
            assert status in {-9, 0}, made.output.read_text()
            kills += status == -9
        same(made, whole)
        runs += 1
