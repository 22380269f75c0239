"""The learning-rate range test."""

import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import TINY, script, tiny_config
from fitting import fitted, metrics
from forks import call_text

from nmt.training.job import Job, set_up

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_lr.py"


@pytest.fixture(scope="module")
def find_lr() -> ModuleType:
    return script("find_lr")


def curve(rates: list[float], steepest: float) -> list[float]:
    """Make losses that fall fastest, per decade, at the rate `steepest`, and explode two decades above it."""
    decades = np.log10(rates) - math.log10(steepest)
    return list(7 - 3 / (1 + np.exp(-4 * decades)) + np.exp(3 * (decades - 2)))


@pytest.mark.parametrize("rate", [1e-4, 3e-3, 0.5])
def test_landmarks_are_those_of_the_curve(rate: float, find_lr: ModuleType) -> None:
    rates = list(np.geomspace(rate / 1000, rate * 1000, 300))
    losses = curve(rates, rate)
    noisy = list(np.array(losses) + np.random.default_rng(1).normal(0, 0.1, len(losses)))
    lowest = rates[int(np.argmin(losses))]
    for each, error in ((losses, 0.2), (noisy, 0.5), ([*losses[:-1], math.inf], 0.2)):
        assert find_lr.landmarks(rates, each) == pytest.approx((rate, lowest), rel=error)


def test_a_loss_that_only_rises_has_none(find_lr: ModuleType) -> None:
    rates = list(np.geomspace(1e-3, 1, 50))
    assert find_lr.landmarks(rates, list(np.linspace(1, 2, 50))) is None
    assert find_lr.landmarks(rates, [1.0] * 50) is None
    assert find_lr.landmarks(rates[:2], [1.0, math.inf]) is None


def test_it_has_diverged_well_above_the_start_or_without_a_number(find_lr: ModuleType) -> None:
    assert not find_lr.diverged([])
    assert not find_lr.diverged([7.0] * 40)
    assert not find_lr.diverged([7.0] * 20 + [4.0] * 20 + [8.5] * 40)
    assert find_lr.diverged([7.0] * 20 + [4.0] * 20 + [9.0] * 40)
    assert find_lr.diverged([7.0, math.inf])
    assert find_lr.diverged([7.0] * 40 + [math.nan])


@pytest.mark.slow
def test_its_updates_are_those_of_training(find_lr: ModuleType, tmp_path: Path) -> None:
    """With a constant rate, its losses equal those in a run's metrics.jsonl."""
    config = tiny_config("training.max_steps=8", "training.log_every=1", "schedule=constant", "optimizer.lr=0.004")
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"warmup_steps": 0})})
    lines = metrics(fitted(config, tmp_path / "run"))
    rates: list[float] = []
    losses: list[float] = []
    ramp = find_lr.Ramp(0.004, 0.004, 8, 0.004)
    with Job.join(config, tmp_path / "test") as job:
        find_lr.range_test(set_up(job).trainer, ramp, rates, losses)
    assert losses == [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
@pytest.mark.system
def test_it_suggests_a_rate_and_repeats_itself(tmp_path: Path) -> None:
    words = ["--updates", "30", *TINY, "seed=3"]
    done = [call_text(SCRIPT, *words, f"hydra.run.dir={name}", cwd=tmp_path) for name in ("a", "b")]
    assert done[0].returncode == 0, done[0].stderr
    *_, outcome, override = done[0].stdout.splitlines()
    assert done[1].stdout.splitlines()[-2:] == [outcome, override]
    first, second = (json.loads((tmp_path / name / "find_lr.json").read_text()) for name in ("a", "b"))
    assert first["losses"] == second["losses"]
    assert override == f"optimizer.lr={first['suggestion']:.2g}"
    lr = math.sqrt(first["rates"][0] * 1000 * first["rates"][0] * 1000)
    np.testing.assert_allclose(first["rates"], np.geomspace(lr / 1000, lr * 1000, 30)[: len(first["rates"])])
    assert first["diverged"] == ("had not diverged" not in outcome)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"find_lr.json", "find_lr.png"}
    assert (tmp_path / "a" / "find_lr.png").read_bytes().startswith(b"\x89PNG")
