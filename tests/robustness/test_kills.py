"""Killed at any moment and started again, a run ends in the same bits as one that nothing disturbed."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import TINY, values_of
from fitting import before_update
from forks import Work, ended, forked, killed_after
from kills import counting, curves, differing, killed_at, outcome

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.system]  # tests/training kills runs within its process
# Validations, checkpoints between them, a schedule with memory, dropout, drawn segmentations.
RECIPE = [
    *TINY,
    "training.max_epochs=2",
    "training.log_every=3",
    "training.checkpoint_every=5",
    "training.ema_decay=0.9",
    "tokenizer.sampling=0.1",
    "validation.unit=steps",
    "validation.every=7",
    "validation.samples=1",
]


class Scene(NamedTuple):
    """A recipe that runs below a folder."""

    folder: Path
    run: Path
    work: Work
    output: Path


def scene(folder: Path) -> Scene:
    folder.mkdir()
    config = validated(
        TrainConfig, values_of("train", [*RECIPE, f"data.cache_dir={folder / 'cache'}"])
    ).with_absolute_paths()

    def work() -> int:
        from nmt.training.job import train

        torch.set_num_threads(1)
        return train(config, folder / "run", [])

    return Scene(folder, folder / "run", work, folder.with_suffix(".txt"))


class Whole(NamedTuple):
    """The run that nothing disturbed."""

    outcome: dict[str, object]
    curves: dict[str, list[tuple[int, bytes]]]
    changes: int  # of the disk
    seconds: float


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    made = scene(tmp_path_factory.mktemp("whole") / "scene")
    count, began = made.folder.with_suffix(".count"), time.monotonic()
    assert ended(forked(counting(made.work, made.folder, count), made.output)) == 0, made.output.read_text()
    return Whole(outcome(made.run), curves(made.run), int(count.read_text()), time.monotonic() - began)


def same(made: Scene, whole: Whole) -> None:
    expected = {**whole.outcome, "config.yaml": outcome(made.run)["config.yaml"]}  # it names the folder of the cache
    assert differing(expected, outcome(made.run)) == []
    assert curves(made.run) == whole.curves
    assert not list(made.folder.rglob("*.part"))
    printed = made.output.read_text()
    assert "Traceback" not in printed, printed


def killed_at_change_and_again(folder: Path, changes: list[int]) -> Scene:
    made = scene(folder)
    for change in changes:
        status = ended(forked(killed_at(made.work, change, made.folder), made.output))
        assert status in {-9, 0}, made.output.read_text()
    assert ended(forked(made.work, made.output)) == 0, made.output.read_text()
    return made


@pytest.mark.parametrize("part", range(2))
def test_killed_between_two_changes_of_the_disk(part: int, whole: Whole, tmp_path: Path) -> None:
    """Two kills each, spread over all of the run."""
    draw = random.Random(part)
    first = draw.randrange(part * whole.changes // 2, (part + 1) * whole.changes // 2)
    made = killed_at_change_and_again(tmp_path / "scene", [first + 1, draw.randrange(1, whole.changes)])
    same(made, whole)


@pytest.mark.parametrize("steps", [(7, 15), (1, 6)])  # 6 and 15: a line of the log is due; 7: a validation
def test_stopped_by_signals(steps: tuple[int, ...], whole: Whole, tmp_path: Path) -> None:
    """The rates, the captions and the choices in TensorBoard, too, are those of a run without them."""
    made = scene(tmp_path / "scene")
    for step in steps:
        assert ended(forked(signalled_in(made.work, step), made.output)) == 128 + signal.SIGTERM
    assert ended(forked(made.work, made.output)) == 0, made.output.read_text()
    same(made, whole)


def signalled_in(work: Work, step: int) -> Work:
    """`work`, asked to stop while it makes an update."""

    def asked() -> int:
        before_update(pytest.MonkeyPatch(), step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        return work()

    return asked


@pytest.mark.parametrize("part", range(8))
def test_killed_before_each_change_of_the_disk(part: int, whole: Whole, tmp_path: Path) -> None:
    for change in range(1 + part, whole.changes + 1, 8):
        same(killed_at_change_and_again(tmp_path / f"scene-{change}", [change]), whole)


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments(seed: int, whole: Whole, tmp_path: Path) -> None:
    """At least ten kills each, most runs more than once."""
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
