"""Helpers to train runs in this process without the final evaluation, to interrupt them and to compare them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.config.schema import TrainConfig
from nmt.model.checkpoints import FILES, read_checkpoint
from nmt.training.job import Job, fit, set_up
from nmt.training.journal import Journal
from nmt.training.loop import Observer
from nmt.training.trainer import Trainer, Update

TIMED = {"time", "train/tokens_per_second", "train/utilisation"}  # measured times, which differ between equal runs


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
