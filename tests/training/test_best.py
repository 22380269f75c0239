"""The best checkpoints and their average: which are kept, when the average is taken, and whole runs killed anywhere."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, values_of
from torch import nn

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.training import checkpoint
from nmt.training.best import Average, BestCheckpoints
from nmt.training.job import train
from nmt.training.journal import Journal
from nmt.training.validation import Validation

Config = Callable[..., TrainConfig]


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
    assert train(validated(TrainConfig, values_of("train", [*RUN, *AVERAGED])), run, []) == 0
    return run


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
    assert logged(run) == logged(whole)
    assert in_manifest(run) == in_manifest(whole)


def logged(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in {"time", "train/tokens_per_second"}} for line in lines]


def in_manifest(run: Path) -> dict[str, Any]:
    training: dict[str, Any] = json.loads((run / "manifest.json").read_text())["training"]
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


@pytest.fixture
def _unevaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmt.training.job._evaluate", lambda *_: None)


@pytest.mark.system
def test_the_end_of_a_run_is_the_average_or_the_best_and_says_so(whole: Path) -> None:
    found, lines = in_manifest(whole), logged(whole)
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
    step = average["step"] if average["taken"] else best[0]
    (line,) = [line for line in lines if line["step"] == step and ("average/bleu" in line) == average["taken"]][-1:]
    results = json.loads((whole / "results.json").read_text())
    bleu = line["average/bleu" if average["taken"] else "validation/bleu"]
    assert results["validation"]["bleu"] == pytest.approx(bleu, abs=1e-4)
    assert "average of the best validations" in (whole / "train.log").read_text()
    assert names(whole / "checkpoints") == {
        "best.safetensors",
        "last.pt",
        *(f"step-{step}.safetensors" for step in average["steps"]),
    }


@pytest.mark.system
@pytest.mark.usefixtures("_unevaluated")
def test_a_finished_run_stays_as_it_is(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    saved = [*(run / "checkpoints").iterdir(), run / "metrics.jsonl"]
    before = [path.read_bytes() for path in saved]
    monkeypatch.setattr(checkpoint, "save", kill)
    finish(run)
    assert [path.read_bytes() for path in saved] == before
    assert_same(run, whole)


@pytest.mark.system
@pytest.mark.usefixtures("_unevaluated")
def test_an_end_that_is_moved_back_to_where_the_run_is_is_averaged_too(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def stopped(epochs: float, score: float) -> bool:
        return (run / "checkpoints" / "step-3.safetensors").exists() and len(names(run / "checkpoints")) > 3

    config = validated(TrainConfig, values_of("train", [*RUN, *AVERAGED, "optimizer.lr=1e-9"]))
    assert train(config, run, [], None, stopped) == 0
    assert in_manifest(run).get("average") is None
    shorter = validated(TrainConfig, values_of("train", [*RUN, *AVERAGED, "optimizer.lr=1e-9", "training.max_steps=6"]))
    assert train(shorter, run, []) == 0
    found = in_manifest(run)["average"]
    assert (found["step"], found["steps"]) == (6, [3, 6])
    saved = checkpoint.load(run / "checkpoints" / "last.pt")
    assert (saved["step"], saved["best"]["average"]) == (6, found)
    assert sum("average/loss" in line for line in logged(run)) == 1
    assert train(shorter, run, []) == 0
    assert sum("average/loss" in line for line in logged(run)) == 1


@pytest.mark.system
@pytest.mark.usefixtures("_unevaluated")
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


@pytest.mark.system
@pytest.mark.usefixtures("_unevaluated")
def test_killed_again_and_again_a_run_ends_in_the_same_bits(whole: Path, tmp_path: Path) -> None:
    run, reached = tmp_path / "run", []
    # Of each start, after saving: step-3.safetensors; last.pt; step-6.safetensors; last.pt; last.pt when
    # step-3.safetensors is not removed yet.
    for event in (6, 10, 10, 14, 18):
        killed(run, event)
        last = run / "checkpoints" / "last.pt"
        reached.append(checkpoint.load(last)["step"] if last.exists() else 0)
    assert reached == [0, 3, 3, 6, 9]
    assert "step-3.safetensors" in names(run / "checkpoints")
    assert_same(finish(run), whole)


@pytest.mark.system
@pytest.mark.usefixtures("_unevaluated")
@pytest.mark.parametrize("gain", [0.5, -0.5])
def test_the_monitored_score_decides(
    gain: float, train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scores that are told, not measured."""
    told = iter([3.0, 7.0, 5.0, 7.0 + gain])
    monkeypatch.setattr(
        "nmt.training.validation.Validator.__call__",
        lambda _: Validation({"loss": 1.0, "perplexity": 1.0, "bleu": next(told)}, [], None),
    )
    assert train(train_config(*RUN, "training.average_best=2"), tmp_path / "run", []) == 0
    best = checkpoint.load(tmp_path / "run" / "checkpoints" / "best.safetensors")
    assert (best["step"], best.get("averaged")) == ((9, [6, 9]) if gain > 0 else (6, None))
    assert in_manifest(tmp_path / "run")["best_bleu"] == max(7.0, 7.0 + gain)
    kept = [checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-{step}.safetensors")["model"] for step in (6, 9)]
    for name, tensor in best["model"].items() if gain > 0 else ():
        torch.testing.assert_close(tensor, (kept[0][name] + kept[1][name]) / 2)
