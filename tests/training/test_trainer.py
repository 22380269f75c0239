"""Updates: accumulation, clipping, non-finite gradients, batches too large for memory, optimizers, schedules."""

import logging
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config
from fitting import trainer_of

from nmt.config.errors import UserError
from nmt.data.batching import Batch
from nmt.training.losses import Objective, Value
from nmt.training.trainer import MemoryLimit, Trainer

STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0"]
AT_RATE = ["schedule=constant", "schedule.warmup_steps=0"]
SGD = [*STILL, *AT_RATE, "optimizer=sgd", "optimizer.lr=0.5"]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def parts(trainer: Trainer, count: int = 1) -> list[Batch]:
    return trainer.batches.load(trainer.plan[0], 0, count)


@pytest.mark.parametrize("overrides", [[], ["training.r_drop=5"]])
def test_a_split_batch_gives_the_same_update(overrides: list[str]) -> None:
    results = []
    for count in (1, 3):
        trainer = trainer_of(tiny_config(*SGD, "training.max_grad_norm=null", *overrides))
        before = weights(trainer)
        update = trainer.update(parts(trainer, count))
        results.append((weights(trainer) - before, update))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert results[0][1].tokens == results[1][1].tokens
    torch.testing.assert_close(results[0][1].terms, results[1][1].terms, rtol=1e-4, atol=1e-4)
    assert results[0][0].abs().max() > 1e-3


def test_gradients_are_those_of_a_target_token() -> None:
    """Gradients are means over target tokens: a batch with each pair twice gives the same update."""
    changes = []
    for copies in (1, 2):
        trainer = trainer_of(tiny_config(*SGD, "training.max_grad_norm=null"))
        before = weights(trainer)
        trainer.update(trainer.batches.load(np.tile(trainer.plan[0], copies), 0))
        changes.append(weights(trainer) - before)
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-4, atol=1e-6)


def test_every_update_draws_its_own_dropout_masks() -> None:
    trainer = trainer_of(tiny_config(*AT_RATE, "optimizer=sgd", "optimizer.lr=1e-12", "encoder.dropout=0.5"))
    losses = [float(trainer.update(parts(trainer)).terms["loss"]) for _ in range(2)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_clipping_bounds_the_step_by_the_true_norm_and_reports_it(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests also scaled gradients, by a scaler that is active on the CPU."""
    active = partial(torch.amp.GradScaler, init_scale=scale)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: active(device))
    trainer = trainer_of(tiny_config(*SGD, "optimizer.lr=1", "training.max_grad_norm=0.01"))
    before = weights(trainer)
    update = trainer.update(parts(trainer))
    assert update.applied
    assert float((weights(trainer) - before).norm()) == pytest.approx(0.01, rel=1e-3)
    assert 0.1 < update.gradient_norm < 10


@pytest.mark.parametrize("broken", ["gradient", "loss", "gradient of the baseline"])
def test_what_is_not_finite_changes_nothing(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = ["attention=hard", "attention.alignment.baseline=learned"] if "baseline" in broken else []
    trainer = trainer_of(tiny_config(*STILL, *AT_RATE, *hard))
    real = Objective.__call__

    def endless(self: Objective, *given: Any) -> Value:  # noqa: ANN401
        value = real(self, *given)
        return value._replace(total=value.total + torch.inf)

    if broken == "gradient":
        with torch.no_grad():
            trainer.model.output.bias[5] = torch.inf
    elif broken == "loss":
        monkeypatch.setattr(Objective, "__call__", endless)
    else:
        trainer.policy_parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    before = weights(trainer)
    update = trainer.update(parts(trainer, 2))
    assert update.gradient_norm.isfinite() == (broken != "gradient")
    assert not update.applied
    assert torch.equal(weights(trainer), before)


def test_a_resumed_run_has_the_rate_of_the_last_update() -> None:
    config = tiny_config("schedule.warmup_steps=8")
    trainer = trainer_of(config)
    for _ in range(3):
        trainer.next_update()
    resumed = trainer_of(config)
    resumed.load_state_dict(trainer.state_dict())
    (rate,) = {group["lr"] for group in resumed.optimizer.param_groups}
    assert rate == trainer.optimizer.param_groups[0]["lr"] < config.optimizer.lr


def test_bf16_stays_near_fp32() -> None:
    exact, rough = (trainer_of(tiny_config(*STILL), precision) for precision in ("fp32", "bf16"))
    updates = [trainer.update(parts(trainer)) for trainer in (rough, exact)]
    torch.testing.assert_close(updates[0].terms["loss"], updates[1].terms["loss"], rtol=0.01, atol=0)
    torch.testing.assert_close(updates[0].gradient_norm, updates[1].gradient_norm, rtol=0.05, atol=0)
    assert all(parameter.dtype == torch.float32 for parameter in rough.model.parameters())


# Batches that do not fit in memory


class Refusing(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return total.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> None:  # noqa: ANN401
        raise RuntimeError("[enforce fail] can't allocate memory: 99")


def test_a_batch_that_does_not_fit_gives_the_updates_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The updates equal those with training.accumulate=2."""
    accumulated = trainer_of(tiny_config(*STILL, "training.accumulate=2"))
    for _ in range(6):
        accumulated.next_update()
    trainer, real = trainer_of(tiny_config(*STILL)), Objective.__call__
    limit = max(trainer.batches.padded_size(indices) for indices in trainer.plan) / 2

    def with_little_memory(self: Objective, batch: Batch, *others: Any) -> Value:  # noqa: ANN401
        value = real(self, batch, *others)
        if trainer.batches.padded_size(batch.indices) <= limit:
            return value
        return value._replace(total=Refusing.apply(value.total))  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Objective, "__call__", with_little_memory)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            trainer.next_update()
    assert any("out of memory with" in record.getMessage() for record in caplog.records)
    assert trainer.step == 6
    torch.testing.assert_close(weights(trainer), weights(accumulated), rtol=1e-4, atol=1e-6)


def test_parts_double_until_they_fit_and_large_batches_begin_there() -> None:
    memory = MemoryLimit(1)

    def tried(tokens: float, failures: int) -> list[int]:
        return list(islice(memory.attempts(8, tokens, "step 1"), failures + 1))

    assert tried(64, failures=2) == [1, 2, 4]
    assert tried(64, failures=0) == [4]
    assert tried(31, failures=0) == [1]
    assert tried(32, failures=0) == [2]
    with pytest.raises(UserError, match="step 1: out of memory even with one sentence pair"):
        tried(64, failures=9)
