"""Checkpoints: whole or not at all, saved at signals, averaged; and runs killed anywhere."""

import logging
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, values_of
from fitting import fitted, metrics, same, state
from numpy.typing import NDArray
from torch import nn

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.system.distributed import Interrupted
from nmt.system.run import RunDirectory, read_json
from nmt.training import checkpoint
from nmt.training.checkpoint import (
    SAME_CTRL_C,
    Average,
    BestCheckpoints,
    EarlyStopping,
    StopSignals,
    mean_weights,
    swapped_weights,
)
from nmt.training.journal import Journal
from nmt.training.losses.objective import Objective, Value
from nmt.training.trainer import MovingAverage, Trainer, Update
from nmt.training.validation import Validation
from nmt.translate.translator import Translator

Config = Callable[..., TrainConfig]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"step": 1})
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, {"step": 2, "bad": lambda: None})
    assert checkpoint.load(path) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(Hostile())])
def test_corrupt_or_hostile_files_are_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"last\.pt: is corrupt") as error:
        checkpoint.load(tmp_path / "last.pt")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "hacked").exists()


def test_a_hostile_object_inside_a_torch_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Hostile()}, tmp_path / "last.pt")
    with pytest.raises(UserError, match="corrupt"):
        checkpoint.load(tmp_path / "last.pt")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_noticed(place: float, tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    checkpoint.save(path, {"model": {"weight": torch.randn(100, 100)}})
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"best\.safetensors: is corrupt"):
        checkpoint.load(path)


# Signals.

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
at_a_terminal = pytest.mark.usefixtures("signals_of_a_terminal")


@at_a_terminal
@pytest.mark.parametrize("number", STOPPING)
def test_the_first_is_noted_and_ctrl_c_after_it_stops_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(number)
    now = 100.0
    monkeypatch.setattr("nmt.training.checkpoint.time.monotonic", lambda: now)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number
        now += SAME_CTRL_C
        os.kill(os.getpid(), signal.SIGINT)  # the launcher passes on what the terminal has sent already
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) == handler


@at_a_terminal
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_repeats_does_not_disturb_the_checkpoint(number: signal.Signals) -> None:
    with StopSignals() as signals:
        for each in (number, number, signal.SIGTERM):
            os.kill(os.getpid(), each)
        assert signals.received == number


@at_a_terminal
@pytest.mark.parametrize("number", STOPPING)
def test_what_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP, a script's & with SIGINT
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received is None
    assert signal.getsignal(number) == signal.SIG_IGN


@at_a_terminal
def test_a_launcher_hears_of_its_signal_after_the_checkpoint() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    signals = StopSignals()

    def work() -> None:
        with signals.saving(lambda: heard.append(0)):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (signals.received, heard) == (signal.SIGUSR2, [])
            signals.check()

    with pytest.raises(Interrupted):
        work()
    assert heard == [0, signal.SIGUSR2]


@at_a_terminal
def test_signals_during_the_save_do_not_disturb_it() -> None:
    saved: list[str] = []

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saved.append("all of it")

    def work() -> None:
        signals = StopSignals()
        with signals.saving(save):
            os.kill(os.getpid(), signal.SIGTERM)
            signals.check()

    with pytest.raises(Interrupted):
        work()
    assert saved == ["all of it"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@at_a_terminal
def test_what_a_launcher_ignores_is_left_to_it() -> None:
    ignored: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ignored.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is None
    assert ignored == [signal.SIGTERM]
    with StopSignals():
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL  # nobody has asked for it


# Which validation is best, and when patience runs out.


@pytest.mark.parametrize("patience", [2, None])
def test_patience_counts_validations_since_the_best_and_an_equal_score_is_no_improvement(patience: int | None) -> None:
    stopping = EarlyStopping("bleu", patience)
    seen = []
    for step, score in enumerate([1.0, 0.5, 2.0, 2.0, 0.0]):
        best = stopping.update({"bleu": score}, step)
        seen.append((best, stopping.exhausted))
    assert [best for best, _ in seen] == [True, False, True, False, False]
    assert [exhausted for _, exhausted in seen] == [False] * 4 + [patience is not None]
    resumed = EarlyStopping("bleu", patience)
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.state_dict() == {"best": 2.0, "best_step": 2, "waited": 2}


# Averages of weights.


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
        return value._replace(total=value.total * torch.inf) if step == 5 else value

    monkeypatch.setattr(Trainer, "update", recorded)
    monkeypatch.setattr(Objective, "__call__", broken)
    steps = ["training.max_steps=16", "training.max_epochs=2", "validation.unit=steps", "validation.every=8"]
    for decay in (0.0, 0.7):
        seen.clear()
        config = train_config(*steps, f"training.ema_decay={decay}")
        run = fitted(config, tmp_path / str(decay))
    first = seen.pop(0)
    assert set(seen) == {*range(1, 17)} - {5}
    plain, last = state(tmp_path / "0.0"), state(run)
    assert same(last["updated"], plain["model"])  # training knows nothing of it
    expected = numpy_average(first, seen, 0.7)
    for name, averaged in last["model"].items():
        np.testing.assert_allclose(averaged.numpy(), expected[name], rtol=1e-3, atol=1e-5)
    assert not same(last["model"], last["updated"])

    logged = {line["step"]: line["validation/loss"] for line in metrics(run) if "validation/loss" in line}
    for name in ("last", "best"):  # what a validation measured is what the checkpoint brings
        sources, references, _ = RunDirectory(run).held_out("validation")
        scored = Translator.load(run, checkpoint=name).score(sources, references)
        tokens = sum(len(each.tokens) for each in scored)
        loss = -sum(each.log_prob for each in scored) / tokens
        assert loss == pytest.approx(logged[state(run, name)["step"]], rel=1e-5)


def validation_state(step: int, score: float, monitor: str = "bleu") -> dict[str, Any]:
    """A checkpoint whose only weight tells its step."""
    return {"model": {"weight": torch.tensor([[float(step)]])}, "step": step, "scores": {monitor: score}}


def follow(best: BestCheckpoints, scores: dict[int, float]) -> None:
    """Validations as they come, each followed by last.pt."""
    for step, score in scores.items():
        earlier = [each for at, each in scores.items() if at < step]
        better = min if best.monitor == "loss" else max
        best.add(validation_state(step, score, best.monitor), not earlier or better(score, *earlier) not in earlier)
        best.remove_superseded()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def steps_at(best: BestCheckpoints, step: int, score: float) -> tuple[Average | None, float | None]:
    """The outcome of averaging if the average validates with this score, and what it was: of the only weight."""
    model, seen = nn.Linear(1, 1, bias=False), []
    own = model.weight.clone()

    def validate() -> Validation:
        seen.append(model.weight.item())
        return Validation({best.monitor: score}, [], None)

    found = best.average_at(step, model, validate)
    assert torch.equal(model.weight, own)
    return (None, None) if found is None else (found[1], seen[0])


def best_step(directory: Path) -> float:
    return float(checkpoint.load(directory / "best.safetensors")["model"]["weight"])


@pytest.mark.parametrize(
    ("monitor", "scores", "kept"),
    [
        ("bleu", {1: 5.0, 2: 9.0, 3: 1.0, 4: 7.0, 5: 8.0, 6: 2.0}, [2, 4, 5]),
        ("loss", {1: 5.0, 2: 9.0, 3: 1.0, 4: 7.0, 5: 8.0, 6: 2.0}, [1, 3, 6]),
        ("bleu", {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}, [1, 2, 3]),  # of equal ones the earlier, as best.safetensors is
        ("loss", {1: float("nan"), 2: 3.0, 3: 2.0}, [2, 3]),
    ],
)
def test_the_best_are_kept_and_averaged(
    monitor: str, scores: dict[int, float], kept: list[int], tmp_path: Path
) -> None:
    best = BestCheckpoints(tmp_path, monitor, 3)
    follow(best, scores)
    assert names(tmp_path) == {"best.safetensors", *(f"step-{step}.safetensors" for step in kept)}
    single = (max if monitor == "bleu" else min)(scores[step] for step in kept)
    average, weight = steps_at(best, 6, single)
    assert average == Average(6, kept, monitor, single, single, True)
    assert weight == pytest.approx(np.mean(kept))
    assert best_step(tmp_path) == weight
    assert checkpoint.load(tmp_path / "best.safetensors")["averaged"] == kept


@pytest.mark.parametrize(
    ("monitor", "score", "taken"),
    [("bleu", 8.9, False), ("bleu", 9.0, True), ("loss", 5.1, False), ("loss", 4.9, True)],
)
def test_the_average_is_best_if_it_is_at_least_as_good(monitor: str, score: float, taken: bool, tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path, monitor, 2)
    follow(best, {1: 5.0, 2: 9.0, 3: 6.0})
    average, _ = steps_at(best, 3, score)
    assert average is not None
    assert average.taken == taken
    assert best_step(tmp_path) == ((2.5 if monitor == "bleu" else 2.0) if taken else (2 if monitor == "bleu" else 1))


def test_a_single_best_leaves_no_other_files(tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path, "bleu", 1)
    (tmp_path / "step-99.safetensors").write_text("somebody's own")
    follow(best, {1: 5.0, 2: 9.0, 3: 6.0})
    assert names(tmp_path) == {"best.safetensors", "step-99.safetensors"}
    assert steps_at(best, 3, 100.0) == (None, None)
    assert best_step(tmp_path) == 2


def test_one_validation_is_no_average(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = BestCheckpoints(tmp_path, "bleu", 5)
    follow(best, {4: 1.0})
    assert steps_at(best, 4, 100.0) == (None, None)
    assert caplog.records[-1].levelno == logging.WARNING
    assert "training.average_best=5: there are no two validations" in caplog.text


def test_an_end_is_averaged_once_and_a_longer_run_again(tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path, "bleu", 2)
    follow(best, {1: 5.0, 2: 9.0})
    assert steps_at(best, 2, 9.5)[0] is not None
    checkpoint.save(tmp_path / "last.pt", best.state_dict())
    longer = BestCheckpoints(tmp_path, "bleu", 2)
    longer.load_state_dict(checkpoint.load(tmp_path / "last.pt"))
    assert longer.average == best.average
    assert steps_at(longer, 2, 9.5) == (None, None)
    longer.add(validation_state(3, 7.0), False)
    assert longer.average == best.average  # still what best.safetensors is
    average, weight = steps_at(longer, 3, 8.0)
    assert average == Average(3, [2, 3], "bleu", 8.0, 9.0, False)
    assert (weight, best_step(tmp_path)) == (2.5, 2)  # not the average of the end before
    longer.add(validation_state(4, 10.0), True)
    assert longer.average is None
    assert best_step(tmp_path) == 4


def test_what_was_deleted_is_not_averaged_and_best_stays(tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path, "bleu", 3)
    follow(best, {1: 5.0, 2: 9.0, 3: 6.0})
    (tmp_path / "step-2.safetensors").unlink()
    average, weight = steps_at(best, 3, 8.0)
    assert average == Average(3, [1, 3], "bleu", 8.0, 9.0, False)
    assert (weight, best_step(tmp_path)) == (2.0, 2)


def test_a_checkpoint_is_removed_only_after_last(tmp_path: Path) -> None:
    best = BestCheckpoints(tmp_path, "bleu", 2)
    follow(best, {1: 5.0, 2: 6.0})
    best.add(validation_state(3, 7.0), True)
    assert {"step-1.safetensors", "step-2.safetensors", "step-3.safetensors"} <= names(tmp_path)
    best.remove_superseded()
    assert names(tmp_path) == {"best.safetensors", "step-2.safetensors", "step-3.safetensors"}


# Whole runs.

RUN = [*TINY, "training.max_steps=9", "training.log_every=2", "validation.unit=steps", "validation.every=3"]
RUN += ["optimizer.lr=0.02", "schedule=constant", "validation.samples=0", "data.validation_size=4", "data.test_size=4"]
AVERAGED = ["training.average_best=2", "training.ema_decay=0.9", "validation.monitor=loss"]


class Killed(BaseException):
    """Nothing that the code could catch and mend."""


def kill(*_: object) -> None:
    raise Killed


def finish(run: Path) -> Path:
    return fitted(validated(TrainConfig, values_of("train", [*RUN, *AVERAGED])), run)


def killed(run: Path, event: int) -> None:
    """Train until the event-th event: before or after a checkpoint is saved, others are removed or a line is logged."""
    left = event

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:  # noqa: ANN401
            count()
            real(*args)
            count()

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", counted(checkpoint.save))
        patch.setattr(BestCheckpoints, "remove_superseded", counted(BestCheckpoints.remove_superseded))
        patch.setattr(Journal, "_record", counted(Journal._record))
        with pytest.raises(Killed):
            finish(run)


def assert_same(run: Path, whole: Path) -> None:
    """All but what measures time."""
    checkpoints = {path.name: checkpoint.load(path) for path in (run / "checkpoints").iterdir()}
    assert checkpoints.keys() == names(whole / "checkpoints")
    for name, found in checkpoints.items():
        expected = checkpoint.load(whole / "checkpoints" / name)
        assert found.keys() == expected.keys()
        for part in ("model", "updated"):
            tensors, others = found.pop(part, {}), expected.pop(part, {})
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[key], others[key]) for key in tensors)
        for key in ("step", "scores", "averaged", "best", "stopping", "epoch", "position", "validated", "bad"):
            assert found.get(key) == expected.get(key)
    assert metrics(run) == metrics(whole)
    assert in_manifest(run) == in_manifest(whole)


def in_manifest(run: Path) -> dict[str, Any]:
    training: dict[str, Any] = read_json(run / "manifest.json")["training"]
    return {key: value for key, value in training.items() if "second" not in key}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    return finish(tmp_path_factory.mktemp("averaged") / "run")


@pytest.fixture(scope="module")
def unaveraged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed when only the averaging was left to do."""
    run = tmp_path_factory.mktemp("averaged") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BestCheckpoints, "average_at", kill)
        with pytest.raises(Killed):
            finish(run)
    return run


@pytest.mark.system
def test_the_end_of_a_run_is_the_average_or_the_best_and_says_so(whole: Path) -> None:
    found, lines = in_manifest(whole), metrics(whole)
    losses = {line["step"]: line["validation/loss"] for line in lines if "validation/loss" in line}
    assert len(losses) == 3
    average, best = found["average"], sorted(losses, key=lambda step: losses[step])[:2]
    assert average["steps"] == sorted(best)
    assert average["single"] == losses[best[0]]
    (line,) = [line for line in lines if "average/loss" in line]
    assert (line["step"], line["average/steps"], line["average/taken"]) == (9, average["steps"], average["taken"])
    assert line["average/loss"] == average["score"]
    assert average["taken"] == (average["score"] <= average["single"])
    assert found["best_loss"] == min(average["score"], average["single"])
    assert "average of the best validations" in (whole / "train.log").read_text()
    assert names(whole / "checkpoints") == {
        "best.safetensors",
        "last.pt",
        *(f"step-{step}.safetensors" for step in average["steps"]),
    }


@pytest.mark.system
def test_a_finished_run_stays_as_it_is(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    saved = [*(run / "checkpoints").iterdir(), run / "metrics.jsonl"]
    before = [path.read_bytes() for path in saved]
    monkeypatch.setattr(checkpoint, "save", kill)
    finish(run)
    assert [path.read_bytes() for path in saved] == before
    assert_same(run, whole)


@pytest.mark.system
def test_an_end_that_is_moved_back_to_where_the_run_is_is_averaged_too(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def stopped(epochs: float, score: float) -> bool:
        return (run / "checkpoints" / "step-3.safetensors").exists() and len(names(run / "checkpoints")) > 3

    config = validated(TrainConfig, values_of("train", [*RUN, *AVERAGED, "optimizer.lr=1e-9"]))
    fitted(config, run, stopped)
    assert in_manifest(run).get("average") is None
    shorter = validated(TrainConfig, values_of("train", [*RUN, *AVERAGED, "optimizer.lr=1e-9", "training.max_steps=6"]))
    fitted(shorter, run)
    found = in_manifest(run)["average"]
    assert (found["step"], found["steps"]) == (6, [3, 6])
    saved = checkpoint.load(run / "checkpoints" / "last.pt")
    assert (saved["step"], saved["best"]["average"]) == (6, found)
    assert sum("average/loss" in line for line in metrics(run)) == 1
    fitted(shorter, run)
    assert sum("average/loss" in line for line in metrics(run)) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    ("event", "gain"),  # best.safetensors is not yet written, is; the line is in metrics.jsonl; last.pt is written
    [
        *[(1, 1.0), (2, -1.0), (6, 1.0)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 1.0), (4, 1.0), (6, -1.0)]),
    ],
)
def test_killed_while_it_averages_a_run_ends_in_the_same_bits(
    event: int, gain: float, unaveraged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an average that is told to be so much better than it is."""
    real = BestCheckpoints.average_at

    def told(self: BestCheckpoints, step: int, model: nn.Module, validate: Callable[[], Validation]) -> object:
        def better() -> Validation:
            found = validate()
            return found._replace(scores={**found.scores, "loss": found.scores["loss"] - gain})

        return real(self, step, model, better)

    monkeypatch.setattr(BestCheckpoints, "average_at", told)
    undisturbed, run = (shutil.copytree(unaveraged, tmp_path / name) for name in ("undisturbed", "run"))
    finish(undisturbed)
    assert in_manifest(undisturbed)["average"]["taken"] == (gain > 0)
    killed(run, event)
    assert_same(finish(run), undisturbed)
