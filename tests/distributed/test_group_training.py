"""A run on several processes: the same updates as on one process, common decisions, and no process that hangs."""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, run_config
from fitting import before_update, metrics
from forks import ended, forked_group

from nmt.cli.run_command import attempt, log_to_stream, report
from nmt.config.errors import UserError
from nmt.data.batching import Batches
from nmt.data.tokenizer import Tokenizer
from nmt.model.checkpoints import read_checkpoint
from nmt.system.distributed import ProcessGroup
from nmt.training import job
from nmt.training.losses import Objective
from nmt.training.validation import Validator

STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "precision=fp32", "validation.every=100"]
SHORT = [*TINY, *STILL, "training.max_steps=6", "training.max_epochs=3", "data.train_size=100"]
SECONDS = 60


@pytest.fixture(autouse=True)
def no_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def weights(run: Path) -> torch.Tensor:
    model = read_checkpoint(run / "checkpoints" / "last.pt")["model"]
    return torch.cat([model[name].double().flatten() for name in sorted(model)])


def difference(run: Path, other: Path) -> float:
    return float((weights(run) - weights(other)).norm() / weights(other).norm())


def on(rank: int) -> bool:
    """Is this process of a group the one of this rank?"""
    return os.environ.get("RANK") == str(rank)


class Group:
    """A group of processes that train `run` together, as forks: they inherit the faults that a test has planted."""

    def __init__(self, run: Path, size: int, *overrides: str) -> None:
        self.output = run.with_name(f"{run.name}.output")
        config = run_config(*SHORT, *overrides)

        def work() -> int:
            log_to_stream(sys.stderr)
            outcome = attempt(lambda: job.train(config, run))
            if isinstance(outcome, Exception):
                report(outcome, "train")
                return 2
            return outcome

        self.processes = forked_group(work, size, self.output)

    def wait(self) -> list[int]:
        """Wait for all processes, and return their exit statuses. A process that hangs fails the test."""
        deadline = time.monotonic() + SECONDS
        statuses = []
        for process in self.processes:
            while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > deadline:
                    for other in self.processes:
                        os.kill(other, signal.SIGKILL)
                    pytest.fail(f"a process hangs; the first one printed:\n{self.printed()}")
                time.sleep(0.01)
            statuses.append(ended(process))
        return statuses

    def printed(self, rank: int = 0) -> str:
        return self.output.with_name(f"{self.output.name}.{rank}").read_text()


def trained(run: Path, size: int, *overrides: str) -> Path:
    group = Group(run, size, *overrides)
    assert group.wait() == [0] * size, [group.printed(rank) for rank in range(size)]
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run on one process."""
    return trained(tmp_path_factory.mktemp("alone") / "run", 1)


def test_results_of_all_processes_come_in_the_order_of_the_items(tmp_path: Path) -> None:
    def work() -> int:
        with ProcessGroup.join() as group:
            items = list(range(7))
            assert group.merge(number * number for number in group.share(items)) == [number**2 for number in items]
        return 0

    assert [ended(child) for child in forked_group(work, 3, tmp_path / "output")] == [0, 0, 0]


def test_processes_make_the_updates_of_one(alone: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 3)
    assert difference(run, alone) < 1e-6
    scores = [json.loads((path / "results.json").read_text())["test"] for path in (run, alone)]
    for entry in scores:
        entry.pop("sentences_per_second")
    assert scores[0] == scores[1]
    assert (run / "hypotheses" / "test.txt").read_text() == (alone / "hypotheses" / "test.txt").read_text()
    assert json.loads((run / "manifest.json").read_text())["starts"][0]["machine"]["processes"] == 3
    assert not list(run.rglob("*.part"))


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (3, ["training.batch_sentences=2", "training.max_steps=4"]),  # one process has no sentence in some batch
        # The moving baseline depends on the samples of all processes.
        pytest.param(2, ["attention=hard", "attention.alignment.baseline=moving"], marks=pytest.mark.slow),
        pytest.param(2, ["training.r_drop=2", "training.accumulate=2"], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["attention=coverage", "attention.coverage.loss_start=2", "training.ema_decay=0.9"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_objectives_and_batches_of_any_kind_are_those_of_one_process(
    size: int, overrides: list[str], tmp_path: Path
) -> None:
    one = trained(tmp_path / "one", 1, *overrides)
    assert difference(trained(tmp_path / "group", size, *overrides), one) < 1e-5


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch still has every pair once."""
    steps = ["training.max_epochs=2", "validation.unit=steps", "validation.every=100", "training.max_steps=null"]
    run, seen, load = tmp_path / "run", tmp_path / "seen", Batches.load
    whole = trained(tmp_path / "whole", 1, *steps)
    total = read_checkpoint(whole / "checkpoints" / "last.pt")["step"]

    def noted(self: Batches, indices: Any, epoch: int, *parts: int) -> Any:  # noqa: ANN401
        if parts:  # an update names them; pairs whose FLOPs are counted are not trained on
            with seen.open("a") as file:
                file.writelines(f"{self.split.name} {epoch} {index}\n" for index in indices)
        return load(self, indices, epoch, *parts)

    monkeypatch.setattr(Batches, "load", noted)
    for size, stop in ((1, total // 4), (2, total // 2), (3, 3 * total // 4)):
        with monkeypatch.context() as patch:
            before_update(patch, stop, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert Group(run, size, *steps).wait() == [128 + signal.SIGTERM] * size
    trained(run, 1, *steps)
    assert difference(run, whole) < 1e-5
    read = [line for line in seen.read_text().splitlines() if line.startswith("train")]
    report = json.loads((run / "manifest.json").read_text())["data"]
    assert len(read) == len(set(read)) == 2 * report["splits"]["train"]["kept"]


def fail() -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("change", "message", "skipped"),
    [
        (lambda value: value._replace(total=value.total * torch.inf), "non-finite loss or gradient, skipped", 1),
        (lambda _: fail(), "out of memory", 0),  # splits the batch on all processes
    ],
)
def test_what_fails_in_the_update_of_one_is_decided_by_all(
    change: Callable[[Any], Any],
    message: str,
    skipped: int,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = Objective.__call__, itertools.count()

    def changed(self: Objective, batch: Any, step: int) -> Any:  # noqa: ANN401
        value = real(self, batch, step)
        return change(value) if on(1) and step == 3 and next(calls) == 0 else value

    monkeypatch.setattr(Objective, "__call__", changed)
    group = Group(tmp_path / "run", 2)
    assert group.wait() == [0, 0]
    assert group.printed().count(f"step 3: {message}") == 1
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["training"]["bad_steps"] == skipped
    assert (difference(tmp_path / "run", alone) < 1e-6) == (not skipped)


def test_an_error_on_one_ends_all_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tokenizer.decode

    def decode(self: Tokenizer, tokens: Any) -> str:  # noqa: ANN401
        if on(1):
            raise UserError("the disk of this machine is full of cats")
        return real(self, tokens)

    monkeypatch.setattr(Tokenizer, "decode", decode)
    group = Group(tmp_path / "run", 2, "search.batch_tokens=30")
    assert group.wait() == [2, 2]
    assert "nmt-train: error: process 1: the disk of this machine is full of cats" in group.printed()
    assert "Traceback" not in group.printed() + group.printed(1)
    assert "error" not in group.printed(1)


def test_a_lost_process_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_update(monkeypatch, 1, lambda: on(1) and os.kill(os.getpid(), signal.SIGKILL))
    group = Group(tmp_path / "run", 2)
    assert group.wait() == [2, -signal.SIGKILL]
    assert "nmt-train: error: another process has ended, so this one ends too" in group.printed()
    assert "Traceback" not in group.printed()


@pytest.mark.parametrize("where", ["update", pytest.param("validation", marks=pytest.mark.slow)])
def test_a_signal_to_one_stops_all_with_a_checkpoint(
    where: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, run = Validator.__call__, tmp_path / "run"

    def stop() -> None:
        if on(1):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        if where == "update":
            before_update(patch, 3, stop)
        else:
            patch.setattr(Validator, "__call__", lambda self: (stop(), real(self))[1])
        group = Group(run, 2)
        assert group.wait() == [128 + signal.SIGTERM] * 2
    assert "SIGTERM: saving a checkpoint" in group.printed()
    saved = read_checkpoint(run / "checkpoints" / "last.pt")
    assert (saved["step"], saved["validated"]) == (3 if where == "update" else 6, 0)
    assert difference(trained(run, 2), alone) < 1e-6
    lines = metrics(run)
    assert [line["step"] for line in lines if "validation/bleu" in line] == [6]
    assert sum("train/loss" in line for line in lines if line["step"] == 6) == 1
