"""Optimizers, schedules of the learning rate, and moving averages of the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config
from fitting import fitted, metrics, same, state
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import nn

from nmt.config.schema import training as schema
from nmt.data.prepare import prepare
from nmt.model.checkpoints import new_model, read_checkpoint, save_checkpoint
from nmt.system.run import RunDirectory
from nmt.training.losses import Objective, Value
from nmt.training.optimizer import MovingAverage, Schedule, make_optimizer, make_schedule, use_weights
from nmt.training.trainer import Trainer, Update
from nmt.translate.translator import Translator

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
    resumed.load_state_dict(read_checkpoint(tmp_path / "last.pt"))
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        config = tiny_config(*steps, f"training.ema_decay={decay}")
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


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adadelta"])
def test_weight_decay_is_that_of_the_papers_and_of_matrices_alone(optimizer: str) -> None:
    """With a gradient of zero, only the decay remains: decoupled in AdamW, else a gradient of decay * parameters."""
    decay, rate, eps = 0.3, 0.1, 1e-6
    # These add a scalar parameter and the gain of a layer norm.
    parts = ["attention/score=normed_additive", "encoder/self_attention=attention"]
    more = [] if optimizer == "sgd" else [f"optimizer.eps={eps}"]
    config = tiny_config(f"optimizer={optimizer}", f"optimizer.weight_decay={decay}", *parts, *more)
    model = new_model(config, prepare(config.data, config.tokenizer).tokenizers)
    chosen = make_optimizer(config.optimizer, model)
    grouped = [parameter for group in chosen.param_groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for group in chosen.param_groups:
        group["lr"] = rate
    chosen.step()
    for name, parameter in model.named_parameters():
        old = before[name]
        gradient = decay * old
        expected = {
            "adam": old - rate * gradient / (gradient.abs() + eps),  # the first step is about the gradient's sign
            "adamw": old - rate * decay * old,
            "sgd": old - rate * gradient,
            "adadelta": old - rate * gradient * (eps / (0.05 * gradient.square() + eps)).sqrt(),
        }[optimizer]
        decayed = parameter.dim() > 1
        torch.testing.assert_close(parameter.detach(), expected if decayed else old)
        assert decayed == (not any(part in name for part in ("bias", "gain", "norm.weight")))


# Learning-rate schedules


def schedule(total: int = 100, **values: Any) -> Schedule:  # noqa: ANN401
    return make_schedule(TypeAdapter(schema.Schedule).validate_python(values), total)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "constant", "warmup_steps": 4}, {0: 0, 1: 0.25, 2: 0.5, 4: 1, 5: 1, 99: 1}),
        ({"kind": "inverse_sqrt", "warmup_steps": 10}, {0: 0, 5: 0.5, 10: 1, 40: 0.5}),
        (
            {"kind": "cosine", "warmup_steps": 20, "min_factor": 0.1},
            {0: 0, 10: 0.5, 20: 1, 60: 0.55, 100: 0.1, 500: 0.1},
        ),
        (
            {"kind": "cosine", "warmup_steps": 100, "min_factor": 0.0},
            {50: 0.5, 100: 1},
        ),  # ends with the warm-up
        (
            {"kind": "step", "warmup_steps": 0, "start": 10, "every": 5, "factor": 0.5},
            {1: 1, 10: 1, 11: 0.5, 15: 0.5, 16: 0.25, 21: 0.125},
        ),
        ({"kind": "plateau", "warmup_steps": 4, "factor": 0.5, "patience": 0, "min_factor": 0.0}, {0: 0, 2: 0.5, 9: 1}),
    ],
)
def test_factors_by_hand(values: dict[str, Any], expected: dict[int, float]) -> None:
    made = schedule(**values)
    assert {step: made.factor(step) for step in expected} == pytest.approx(expected)


def test_plateau_reduces_when_patience_is_over_and_an_improvement_resets_it() -> None:
    plateau = schedule(kind="plateau", warmup_steps=0, factor=0.5, patience=1, min_factor=0.2)
    seen = []
    for improved in (True, False, True, False, False, False, False, False, False):
        plateau.observe(improved)
        seen.append(plateau.factor(9))
    assert seen == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.2]
    resumed = schedule(kind="plateau", warmup_steps=0, factor=0.5, patience=1, min_factor=0.2)
    resumed.load_state_dict(plateau.state_dict())
    assert resumed.factor(9) == 0.2
