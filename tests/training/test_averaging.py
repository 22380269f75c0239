"""Averages of weights: against NumPy, tied, to the same bits through a checkpoint, and in whole runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch
from nmt.evaluate.evaluation import evaluate, score_settings
from nmt.model.checkpoints import FILES
from nmt.system.run import RunDirectory
from nmt.training import checkpoint
from nmt.training.best import MovingAverage, mean_weights, swapped_weights
from nmt.training.job import train
from nmt.training.losses.objective import Objective, Value
from nmt.training.step import Update, Updater
from nmt.translate.translator import Translator

Config = Callable[..., TrainConfig]
STEPS = ["training.max_steps=16", "training.max_epochs=2", "validation.unit=steps", "validation.every=8"]


class Tied(nn.Module):
    """A matrix with two names, a vector, a buffer."""

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


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def numpy_average(
    first: dict[str, torch.Tensor], updates: dict[int, dict[str, torch.Tensor]], decay: float
) -> dict[str, NDArray[np.float64]]:
    """After the updates of these numbers."""
    found = {name: tensor.numpy().astype(np.float64) for name, tensor in first.items()}
    for step, weights in updates.items():
        kept = min(decay, (1 + step) / (10 + step))
        found = {name: kept * found[name] + (1 - kept) * weights[name].numpy() for name in found}
    return found


def test_the_moving_average_is_that_of_the_equation() -> None:
    model = Tied()
    average, first, updates = MovingAverage(model, 0.6), copied(model), {}
    for step in range(1, 30):  # up to step 12 the warm-up has the smaller decay
        model.change()
        average.update(step)
        updates[step] = own = copied(model)
        expected = numpy_average(first, updates, 0.6)
        with average.in_model():
            for name in ("embedding.weight", "output.weight", "output.bias"):
                np.testing.assert_allclose(model.state_dict()[name].numpy(), expected[name], rtol=1e-4, atol=1e-5)
            assert model.calls == step  # a buffer is no part of the average
            assert not same(copied(model), own)
        assert same(copied(model), own)
    assert all(each.dtype == torch.float32 for each in average.averages)


def test_tied_weights_stay_tied() -> None:
    model = Tied()
    average = MovingAverage(model, 0.9)
    assert len(average.averages) == 2
    model.change()
    average.update(1)
    for _ in range(2):
        with average.in_model():
            assert model.output.weight is model.embedding.weight
        averaged = average.state_dict()["model"]
        assert averaged["output.weight"].data_ptr() == averaged["embedding.weight"].data_ptr()
        average.load_state_dict(average.state_dict())
    assert model.output.weight is model.embedding.weight


def test_a_checkpoint_holds_the_average_and_the_weights_to_the_bit(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    average, resumed = MovingAverage(model, 0.9), MovingAverage(other, 0.9)
    for step in (1, 2, 3):
        model.change()
        average.update(step)
    checkpoint.save(tmp_path / "last.pt", average.state_dict())
    resumed.load_state_dict(checkpoint.load(tmp_path / "last.pt"))
    assert same(copied(other), copied(model))
    for each, changed in ((average, model), (resumed, other)):
        torch.manual_seed(7)
        changed.change()
        each.update(4)
    assert same(resumed.state_dict()["model"], average.state_dict()["model"])
    assert not same(average.state_dict()["model"], average.state_dict()["updated"])


def test_without_decay_there_is_no_average() -> None:
    model = Tied()
    average = MovingAverage(model, 0.0)
    model.change()
    average.update(1)
    assert same(average.state_dict()["model"], copied(model))
    assert set(average.state_dict()) == {"model"}
    assert average.averages == []
    own = copied(model)
    with average.in_model():
        assert same(copied(model), own)


def test_a_model_gets_its_weights_back_whatever_happens() -> None:
    model = Tied()
    own = copied(model)

    def interrupted() -> None:
        with swapped_weights(model, Tied().state_dict()):
            assert not same(copied(model), own)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(RuntimeError), swapped_weights(model, {"embedding.weight": torch.zeros(5, 3)}):
        pass
    assert same(copied(model), own)


def test_the_mean_of_models_is_numpys() -> None:
    models = [Tied().state_dict() for _ in range(3)]
    found = mean_weights(iter(models))
    for name in models[0]:
        expected = np.mean([model[name].double().numpy() for model in models], axis=0)
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-6)
        assert found[name].dtype == torch.float32
    assert same(mean_weights([models[0]]), models[0])


@pytest.mark.system
def test_a_run_validates_and_saves_the_average_and_trains_the_weights(
    train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an update that is skipped does not move the average."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    update, objective = Updater.__call__, Objective.__call__

    def recorded(self: Updater, batches: list[Batch], rate: float, step: int, *rest: Any) -> Update:  # noqa: ANN401
        if not seen:
            seen[0] = copied(self.objective.model)
        done = update(self, batches, rate, step, *rest)
        if done.applied:
            seen[step] = copied(self.objective.model)
        return done

    def broken(self: Objective, batch: Batch, step: int, *rest: float) -> Value:
        value = objective(self, batch, step, *rest)
        return value._replace(total=value.total * torch.inf) if step == 5 else value

    monkeypatch.setattr(Updater, "__call__", recorded)
    monkeypatch.setattr(Objective, "__call__", broken)
    runs = {}
    for decay in (0.0, 0.7):
        seen.clear()
        run = runs[decay] = tmp_path / str(decay)
        config = train_config(*STEPS, f"training.ema_decay={decay}")
        assert train(config, run, []) == 0
    first = seen.pop(0)
    assert set(seen) == {*range(1, 17)} - {5}
    plain, last = (checkpoint.load(run / "checkpoints" / "last.pt") for run in runs.values())
    assert same(last["updated"], plain["model"])  # training knows nothing of it
    expected = numpy_average(first, seen, 0.7)
    for name, averaged in last["model"].items():
        np.testing.assert_allclose(averaged.numpy(), expected[name], rtol=1e-3, atol=1e-5)
    assert not same(last["model"], last["updated"])

    lines = [json.loads(line) for line in RunDirectory(run).metrics.read_text().splitlines()]
    logged = {line["step"]: line["validation/bleu"] for line in lines if "validation/bleu" in line}
    scoring = score_settings(config.evaluation, "fr")
    for name in ("last", "best"):  # what a validation measured is what the checkpoint brings
        sources, references, _ = RunDirectory(run).held_out("validation")
        found = evaluate(Translator.load(run, checkpoint=name), sources, references, scoring, ("bleu",))
        step = checkpoint.load(run / "checkpoints" / FILES[name])["step"]
        assert found.scores.bleu == pytest.approx(logged[step], abs=1e-4)
    results = json.loads((run / "results.json").read_text())
    assert results["validation"]["bleu"] == pytest.approx(max(logged.values()), abs=1e-4)
