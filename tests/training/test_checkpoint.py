"""Checkpoints: atomic writes, saving at signals, the choice of the best, and the moving average of parameters."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import fitted, metrics, same, state
from numpy.typing import NDArray
from torch import nn

from nmt.config.schema import TrainConfig
from nmt.model.checkpoints import read_checkpoint, save_checkpoint
from nmt.system.distributed import Interrupted
from nmt.system.run import RunDirectory
from nmt.training.checkpoint import SAME_CTRL_C, EarlyStopping, StopSignals, load, use_weights
from nmt.training.losses import Objective, Value
from nmt.training.trainer import MovingAverage, Trainer, Update
from nmt.translate.translator import Translator

Config = Callable[..., TrainConfig]


# Signals

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_is_noted_repetitions_are_not_and_ctrl_c_stops_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(number)
    now = 100.0
    monkeypatch.setattr("nmt.training.checkpoint.time.monotonic", lambda: now)
    with StopSignals() as signals:
        for repeated in (number, number, signal.SIGTERM):
            os.kill(os.getpid(), repeated)
        assert signals.received == number
        now += SAME_CTRL_C
        os.kill(os.getpid(), signal.SIGINT)  # a repeated Ctrl-C, from the launcher; ignored
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) == handler


@pytest.mark.parametrize("number", STOPPING)
def test_what_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)  # as nohup does for SIGHUP, and & in a script for SIGINT
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received is None
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_signal_saves_undisturbed_and_then_reaches_the_launcher() -> None:
    events: list[object] = []
    signal.signal(signal.SIGUSR2, lambda number, _: events.append(number))
    signals = StopSignals()

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        events.append("saved all of it")

    def work() -> None:
        with signals.saving(save):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (signals.received, events) == (signal.SIGUSR2, [])
            signals.check()

    with pytest.raises(Interrupted):
        work()
    assert events == ["saved all of it", signal.SIGUSR2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_a_launcher_handles_is_left_to_it() -> None:
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is None
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL  # without a request, SIGUSR2 has no handler
    assert handled == [signal.SIGTERM]


# The best validation and patience


@pytest.mark.parametrize("patience", [2, None])
def test_patience_counts_validations_since_the_best_and_an_equal_score_is_no_improvement(patience: int | None) -> None:
    stopping, resumed = EarlyStopping("bleu", patience), EarlyStopping("bleu", patience)
    scores = [1.0, 0.5, 2.0, 2.0, 0.0]
    seen = [(stopping.update({"bleu": score}, step), stopping.exhausted) for step, score in enumerate(scores)]
    assert [best for best, _ in seen] == [True, False, True, False, False]
    assert [exhausted for _, exhausted in seen] == [False] * 4 + [patience is not None]
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.state_dict() == {"best": 2.0, "best_step": 2, "waited": 2}


# Averages of parameters


class Tied(nn.Module):
    """A model of a matrix with two names, a vector and a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.output.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.parameters():
            parameter.add_(torch.randn_like(parameter))
        self.calls += 1


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def numpy_average(
    first: dict[str, torch.Tensor], updates: dict[int, dict[str, torch.Tensor]], decay: float
) -> dict[str, NDArray[np.float64]]:
    """Compute the moving average after the given updates: step -> parameters."""
    found = {name: tensor.numpy().astype(np.float64) for name, tensor in first.items()}
    for step, weights in updates.items():
        kept = min(decay, (1 + step) / (10 + step))
        found = {name: kept * found[name] + (1 - kept) * weights[name].numpy() for name in found}
    return found


def test_the_moving_average_is_that_of_the_equation() -> None:
    model = Tied()
    average, first, updates = MovingAverage(model, 0.6), copied(model), {}
    for step in range(1, 30):  # up to step 12, the decay of the warm-up is below 0.6
        model.change()
        average.update(step)
        updates[step] = own = copied(model)
        expected = numpy_average(first, updates, 0.6)
        with average.in_model():
            assert model.output.weight is model.embedding.weight
            for name in ("embedding.weight", "output.weight", "output.bias"):
                np.testing.assert_allclose(model.state_dict()[name].numpy(), expected[name], rtol=1e-4, atol=1e-5)
            assert model.calls == step  # buffers are not averaged
            assert not same(copied(model), own)
        assert same(copied(model), own)
    assert all(each.dtype == torch.float32 for each in average.averages)


def test_a_checkpoint_holds_the_average_and_the_weights_to_the_bit(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    average, resumed = MovingAverage(model, 0.9), MovingAverage(other, 0.9)
    for step in (1, 2, 3):
        model.change()
        average.update(step)
    save_checkpoint(tmp_path / "last.pt", average.state_dict())
    resumed.load_state_dict(load(tmp_path / "last.pt"))
    assert same(copied(other), copied(model))
    for each, changed in ((average, model), (resumed, other)):
        torch.manual_seed(7)
        changed.change()
        each.update(4)
    averaged = resumed.state_dict()["model"]
    assert same(averaged, average.state_dict()["model"])
    assert averaged["output.weight"].data_ptr() == averaged["embedding.weight"].data_ptr()
    assert other.output.weight is other.embedding.weight
    assert not same(average.state_dict()["model"], average.state_dict()["updated"])


def test_equal_parameters_and_scores_give_equal_files(tmp_path: Path) -> None:
    scores = {"bleu": 12.5, "loss": 1 / 3, "perplexity": math.inf}
    state = {"model": {"b": torch.ones(3), "a": torch.zeros(2, 2)}, "step": 7, "scores": scores}
    path, written = tmp_path / "best.safetensors", set()
    for _ in range(20):  # the library draws the order of the metadata anew for each file
        save_checkpoint(path, state)
        written.add(path.read_bytes())
    assert len(written) == 1
    assert read_checkpoint(path)["scores"] == scores


def test_a_model_gets_its_weights_back_whatever_happens() -> None:
    model = Tied()
    own = copied(model)

    def interrupted() -> None:
        with use_weights(model, Tied().state_dict()):
            assert not same(copied(model), own)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(RuntimeError), use_weights(model, {"embedding.weight": torch.zeros(5, 3)}):
        pass
    assert same(copied(model), own)


@pytest.mark.system
def test_a_run_validates_and_saves_the_average_and_trains_the_weights(
    train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped update does not change the average either."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    update, objective = Trainer.update, Objective.__call__

    def recorded(self: Trainer, *given: Any) -> Update:  # noqa: ANN401
        if not seen:
            seen[0] = copied(self.model)
        done = update(self, *given)
        if done.applied:
            seen[self.step] = copied(self.model)
        return done

    def broken(self: Objective, batch: Any, step: int) -> Value:  # noqa: ANN401
        value = objective(self, batch, step)
        return value._replace(total=value.total * torch.inf) if step == 3 else value

    monkeypatch.setattr(Trainer, "update", recorded)
    monkeypatch.setattr(Objective, "__call__", broken)
    steps = ["training.max_steps=8", "validation.unit=steps", "validation.every=4"]
    for decay in (0.0, 0.7):
        seen.clear()
        config = train_config(*steps, f"training.ema_decay={decay}")
        run = fitted(config, tmp_path / str(decay))
    first = seen.pop(0)
    assert set(seen) == {*range(1, 9)} - {3}
    plain, last = state(tmp_path / "0.0"), state(run)
    assert same(last["updated"], plain["model"])  # the average does not change training
    expected = numpy_average(first, seen, 0.7)
    for name, averaged in last["model"].items():
        np.testing.assert_allclose(averaged.numpy(), expected[name], rtol=1e-3, atol=1e-5)
    assert not same(last["model"], last["updated"])

    logged = {line["step"]: line["validation/loss"] for line in metrics(run) if "validation/loss" in line}
    for name in ("last", "best"):  # a loaded checkpoint gives the loss that the validation measured
        sources, references, _ = RunDirectory(run).held_out("validation")
        scored = Translator.load(run, checkpoint=name).score(sources, references)
        tokens = sum(len(each.tokens) for each in scored)
        loss = -sum(each.log_prob for each in scored) / tokens
        assert loss == pytest.approx(logged[state(run, name)["step"]], rel=1e-5)
