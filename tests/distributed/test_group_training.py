"""A run on several processes: the same updates as on one process, common decisions, and no process that hangs."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, values_of
from fitting import before_update
from forks import ended, forked_group

from nmt.cli.run_command import attempt, log_to_stream, report
from nmt.config.schema import TrainConfig
from nmt.config.validation import validated
from nmt.model.checkpoints import read_checkpoint
from nmt.system.distributed import ProcessGroup
from nmt.training import job

STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "precision=fp32", "validation.every=100"]
SHORT = [*TINY, *STILL, "training.max_steps=6", "training.max_epochs=3", "data.train_size=100"]
SECONDS = 60
Prepare = Callable[[int], object]


@pytest.fixture(autouse=True)
def no_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def weights(run: Path) -> torch.Tensor:
    model = read_checkpoint(run / "checkpoints" / "last.pt")["model"]
    return torch.cat([model[name].double().flatten() for name in sorted(model)])


def difference(run: Path, other: Path) -> float:
    return float((weights(run) - weights(other)).norm() / weights(other).norm())


class Group:
    """A group of processes that train `run` together."""

    def __init__(self, run: Path, size: int, *overrides: str, prepare: Prepare = lambda _: None) -> None:
        """prepare: called with the rank before training, to plant a fault."""
        self.output = run.with_name(f"{run.name}.output")
        config = validated(TrainConfig, values_of("train", [*SHORT, *overrides]))

        def work() -> int:
            import sys

            log_to_stream(sys.stderr)
            prepare(int(os.environ.get("RANK", "0")))
            outcome = attempt(lambda: job.train(config, run, []), debug=False)
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


def trained(run: Path, size: int, *overrides: str, prepare: Prepare = lambda _: None) -> Path:
    group = Group(run, size, *overrides, prepare=prepare)
    statuses = group.wait()
    assert statuses == [0] * size, [group.printed(rank) for rank in range(size)]
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
def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    """Each epoch still has every pair once."""
    steps = ["training.max_epochs=2", "validation.unit=steps", "validation.every=100", "training.max_steps=null"]
    whole, run, seen = tmp_path / "whole", tmp_path / "run", tmp_path / "seen"
    trained(whole, 1, *steps)
    total = read_checkpoint(whole / "checkpoints" / "last.pt")["step"]

    def stop_after(step: int) -> Prepare:
        def prepare(rank: int) -> None:
            from nmt.data.batching import Batches

            load = Batches.load

            def noted(self: Batches, indices: Any, epoch: int, *parts: int) -> Any:  # noqa: ANN401
                if parts:  # an update names them; pairs whose FLOPs are counted are not trained on
                    with seen.open("a") as file:
                        file.writelines(f"{self.split.name} {epoch} {index}\n" for index in indices)
                return load(self, indices, epoch, *parts)

            Batches.load = noted  # type: ignore[method-assign]
            if rank == 0:
                before_update(pytest.MonkeyPatch(), step, lambda: os.kill(os.getpid(), signal.SIGTERM))

        return prepare

    stops = [total // 4, total // 2, 3 * total // 4, 10**9]
    for size, stop in zip((1, 2, 3, 1), stops, strict=True):
        status = Group(run, size, *steps, prepare=stop_after(stop)).wait()
        assert status == [0 if stop == 10**9 else 128 + signal.SIGTERM] * size
    assert difference(run, whole) < 1e-5
    read = [line for line in seen.read_text().splitlines() if line.startswith("train")]
    report = json.loads((run / "manifest.json").read_text())["data"]
    assert len(read) == len(set(read)) == 2 * report["splits"]["train"]["kept"]


def breaking(rank: int, step: int, change: Callable[[Any], Any]) -> Prepare:
    """Change the objective's value on one process in one update."""

    def prepare(own: int) -> None:
        from nmt.training.losses import Objective

        real = Objective.__call__
        calls = iter(range(10**9))

        def changed(self: Objective, batch: Any, number: int, *rest: Any) -> Any:  # noqa: ANN401
            value = real(self, batch, number, *rest)
            return change(value) if own == rank and number == step and next(calls) == 0 else value

        Objective.__call__ = changed  # type: ignore[method-assign]

    return prepare


def test_a_non_finite_loss_on_one_skips_the_update_on_all(tmp_path: Path) -> None:
    infinite = breaking(1, 3, lambda value: value._replace(total=value.total * torch.inf))
    group = Group(tmp_path / "run", 2, prepare=infinite)
    assert group.wait() == [0, 0]
    assert "step 3: non-finite loss or gradient, skipped" in group.printed()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["training"]["bad_steps"] == 1


def test_memory_that_fails_on_one_splits_the_batch_on_all(alone: Path, tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise torch.OutOfMemoryError

    group = Group(tmp_path / "run", 2, prepare=breaking(1, 3, fail))
    assert group.wait() == [0, 0]
    assert group.printed().count("step 3: out of memory") == 1
    assert difference(tmp_path / "run", alone) < 1e-6


def test_an_error_on_one_ends_all_in_one_line(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        from nmt.data.tokenizer import Tokenizer

        real = Tokenizer.decode

        def decode(self: Tokenizer, tokens: Any) -> str:  # noqa: ANN401
            if rank == 1:
                from nmt.config.errors import UserError

                raise UserError("the disk of this machine is full of cats")
            return real(self, tokens)

        Tokenizer.decode = decode  # type: ignore[method-assign]

    group = Group(tmp_path / "run", 2, "search.batch_tokens=30", prepare=prepare)
    assert group.wait() == [2, 2]
    assert "nmt-train: error: process 1: the disk of this machine is full of cats" in group.printed()
    assert "Traceback" not in group.printed() + group.printed(1)
    assert "error" not in group.printed(1)


def test_a_lost_process_ends_the_others(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            before_update(pytest.MonkeyPatch(), 1, lambda: os.kill(os.getpid(), signal.SIGKILL))

    group = Group(tmp_path / "run", 2, prepare=prepare)
    assert group.wait() == [2, -signal.SIGKILL]
    assert "nmt-train: error: another process has ended, so this one ends too" in group.printed()
    assert "Traceback" not in group.printed()


@pytest.mark.parametrize("where", ["update", pytest.param("validation", marks=pytest.mark.slow)])
def test_a_signal_to_one_stops_all_with_a_checkpoint(where: str, alone: Path, tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        from nmt.training.validation import Validator

        def stop() -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        real = Validator.__call__

        def validate(self: Validator) -> Any:  # noqa: ANN401
            stop()
            return real(self)

        if where == "update":
            before_update(pytest.MonkeyPatch(), 3, stop)
        else:
            Validator.__call__ = validate  # type: ignore[method-assign, assignment]

    group = Group(tmp_path / "run", 2, prepare=prepare)
    assert group.wait() == [128 + signal.SIGTERM] * 2
    assert "SIGTERM: saving a checkpoint" in group.printed()
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")
    assert saved["step"] == (3 if where == "update" else 6)
    assert saved["validated"] == 0
    trained(tmp_path / "run", 2)
    assert difference(tmp_path / "run", alone) < 1e-6
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "validation/bleu" in line] == [6]
    assert sum("train/loss" in line for line in steps if line["step"] == 6) == 1


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    def prepare(rank: int) -> None:
        real = job.prepare_corpus
        job.prepare_corpus = lambda data, tokenizer: real(data.model_copy(update={"train_size": 90 + rank}), tokenizer)  # type: ignore[attr-defined]

    group = Group(tmp_path / "run", 2, prepare=prepare)
    assert group.wait() == [2, 2]
    assert "process 1: data: another corpus than that of rank 0" in group.printed()
    assert not (tmp_path / "run" / "config.yaml").exists()
