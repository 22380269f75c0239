"""Helpers to build trainers, to train runs in this process, to stop them and to compare them."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, make_batches
from nmt.data.prepare import prepare
from nmt.model.checkpoints import FILES, new_model, read_checkpoint
from nmt.system.machine import Machine
from nmt.training.job import Job, fit, set_up, train
from nmt.training.journal import Journal
from nmt.training.loop import Observer
from nmt.training.losses import Objective
from nmt.training.other_runs import load_teachers
from nmt.training.trainer import Trainer, Update

TIMED = {"time", "train/tokens_per_second", "train/utilisation"}  # measured times, which differ between equal runs


def trainer_of(config: TrainConfig, precision: str = "fp32") -> Trainer:
    """Build a model with random parameters and its trainer on the CPU."""
    corpus, machine = prepare(config.data, config.tokenizer), Machine(torch.device("cpu"), precision)
    torch.manual_seed(3)
    model = new_model(config, corpus.tokenizers)
    teachers = load_teachers(config, corpus, machine).models
    objective = Objective(model, config, corpus.tokenizers.target.pad, teachers)
    return Trainer(config, model, objective, make_batches(corpus, "train", config), machine)


def first_batch(trainer: Trainer) -> Batch:
    """Load the first batch that the trainer would update on."""
    (batch,) = trainer.batches.load(trainer.plan[0], 0)
    return batch


def stopped(config: TrainConfig, run: Path, step: int, number: int = signal.SIGTERM) -> Path:
    """Train a run until it is stopped by a signal in update number `step`."""
    with pytest.MonkeyPatch.context() as patch:
        before_update(patch, step, lambda: os.kill(os.getpid(), number))
        assert train(config, run) == 128 + number
    return run


def fitted(config: TrainConfig, run: Path, observer: Observer | None = None) -> Path:
    """Train or resume the run in `run`, without the final evaluation."""
    with Job.join(config, run) as job:
        setup = set_up(job)
        with Journal(job.run, config) as journal:
            fit(setup, journal, observer)
    return run


def before_update(patch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Call `act` before each update with the number `step`."""
    real = Trainer.update

    def update(self: Trainer, *given: Any) -> Update:  # noqa: ANN401
        if self.step + 1 == step:
            act()
        return real(self, *given)

    patch.setattr(Trainer, "update", update)


def state(run: Path, name: str = "last") -> dict[str, Any]:
    """Read a checkpoint."""
    loaded: dict[str, Any] = read_checkpoint(run / "checkpoints" / FILES[name])
    return loaded


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    """Read the parameters in a checkpoint."""
    model: dict[str, torch.Tensor] = state(run, name)["model"]
    return model


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Are the parameters equal to the bit?"""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Read the complete lines of metrics.jsonl without measured times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines]
