"""Batches that memory does not suffice for: the update of as many parts as fit, never the end of the run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch
from nmt.model.seq2seq import Seq2Seq
from nmt.training.job import train
from nmt.training.losses import objective as objective_module
from nmt.training.losses.objective import Objective, Value
from nmt.training.step import MicroBatcher, OutOfMemory, Update
from nmt.training.trainer import Trainer

Config = Callable[..., TrainConfig]
SHORT = ["training.max_steps=6", "validation.unit=steps", "validation.every=3", "training.average_best=2"]
UPDATE = Update({}, 1, torch.ones(()), True)


def weights(run: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]
    return model


CUDA = torch.OutOfMemoryError("CUDA out of memory")
CPU = RuntimeError("[enforce fail] can't allocate memory: 99")


@pytest.mark.parametrize(("during", "error"), [("forward", CUDA), ("backward", CPU)])
def test_a_batch_that_does_not_fit_gives_the_update_of_its_parts(
    during: str,
    error: RuntimeError,
    train_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With dropout and all: the bits are those of training.accumulate."""
    config = train_config(
        *SHORT, "training.accumulate=2", "embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0"
    )
    assert train(config, tmp_path / "accumulated", []) == 0
    whole = max(len(plan) for plan in sizes(config, tmp_path, monkeypatch))
    real = Objective.__call__
    refused = []

    def with_little_memory(self: Objective, batch: Batch, *others: Any) -> Value:  # noqa: ANN401
        value = real(self, batch, *others)
        if len(batch.indices) <= -(-whole // 2):
            return value
        refused.append(len(batch.indices))
        if during == "forward":
            raise error
        return value._replace(total=Refusing.apply(value.total, error))  # type: ignore[no-untyped-call]

    monkeypatch.setattr(objective_module.Objective, "__call__", with_little_memory)
    config = config.model_copy(update={"training": config.training.model_copy(update={"accumulate": 1})})
    with caplog.at_level(logging.WARNING):
        assert train(config, tmp_path / "split", []) == 0
    assert refused
    assert any("out of memory with" in record.getMessage() for record in caplog.records)
    for name, value in weights(tmp_path / "accumulated").items():
        torch.testing.assert_close(weights(tmp_path / "split")[name], value)


class Refusing(torch.autograd.Function):
    """Identity, whose gradient finds no memory."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, error: RuntimeError) -> torch.Tensor:  # noqa: ANN401
        ctx.error = error
        return total.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> None:  # noqa: ANN401
        raise ctx.error


def sizes(config: TrainConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches of the first epoch."""
    plans: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", lambda self, _: plans.extend(self.plan))
        patch.setattr("nmt.training.job._evaluate", lambda *_: None)
        patch.setattr("nmt.training.job._results", lambda *_: {})
        train(config, folder / "planned", [])
    return plans


def test_parts_double_until_they_fit_and_large_batches_begin_there() -> None:
    tried: list[int] = []

    def attempt(parts: int) -> Update:
        tried.append(parts)
        if 64 / parts > 20:
            raise OutOfMemory
        return UPDATE

    parts = MicroBatcher(1)
    assert parts(attempt, 8, 64, "step 1") is UPDATE
    assert tried == [1, 2, 4]
    tried.clear()
    parts(attempt, 8, 64, "step 2")
    assert tried == [4]
    tried.clear()
    parts(lambda n: tried.append(n) or UPDATE, 8, 31, "step 3")  # type: ignore[func-returns-value]
    assert tried == [1]
    tried.clear()
    parts(lambda n: tried.append(n) or UPDATE, 8, 32, "step 4")  # type: ignore[func-returns-value]
    assert tried == [2]


def test_a_pair_that_does_not_fit_alone_ends_the_run_in_words() -> None:
    def attempt(parts: int) -> Update:
        raise OutOfMemory

    with pytest.raises(UserError, match="step 7: out of memory even with one sentence pair"):
        MicroBatcher(1)(attempt, 5, 50, "step 7")


def test_other_errors_are_not_taken_for_it() -> None:
    def attempt(parts: int) -> Update:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        MicroBatcher(1)(attempt, 5, 50, "step 1")


def test_validation_translates_and_measures_by_halves(
    train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(train_config(*SHORT), tmp_path / "whole", []) == 0
    for name, index in (("encode", 1), ("force", 1), ("forward", 1)):
        real = getattr(Seq2Seq, name)

        def limited(self: Seq2Seq, *arguments: Any, _real: Any = real, _index: int = index, **more: Any) -> Any:  # noqa: ANN401
            if not self.training and len(arguments[0]) > 3:
                raise torch.OutOfMemoryError("out of memory")
            return _real(self, *arguments, **more)

        monkeypatch.setattr(Seq2Seq, name, limited)
    assert train(train_config(*SHORT), tmp_path / "halved", []) == 0
    assert (tmp_path / "halved" / "hypotheses" / "test.txt").read_bytes() == (
        tmp_path / "whole" / "hypotheses" / "test.txt"
    ).read_bytes()
    for name, value in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "halved")[name], value)
