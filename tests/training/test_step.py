"""One update: accumulation, clipping, non-finite gradients, every optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, Batches
from nmt.data.prepare.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.model.checkpoints import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.system.machine import Machine
from nmt.training.losses.objective import Objective, Value
from nmt.training.optimizer import make_optimizer
from nmt.training.step import Updater

Config = Callable[..., TrainConfig]
CPU = Machine(torch.device("cpu"), "fp32")
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0"]


def setup(config: TrainConfig) -> tuple[Prepared, Batches, Seq2Seq, Updater]:
    prepared = prepare(config.data, config.tokenizer)
    batches = Batches(prepared.splits["train"], prepared.tokenizers, batch_tokens=512, batch_sentences=None, seed=1)
    torch.manual_seed(3)
    model = new_model(config, prepared.tokenizers)
    optimizer = make_optimizer(config.optimizer, model)
    updater = Updater(
        model, Objective(model, config, prepared.tokenizers.target), optimizer, config.training.max_grad_norm, CPU
    )
    return prepared, batches, model, updater


def weights(model: Seq2Seq) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def parts(batches: Batches, count: int) -> list[Batch]:
    return batches.load(batches.epoch(0)[0], 0, count)


@pytest.mark.parametrize("overrides", [[], ["training.r_drop=5"]])
def test_a_split_batch_gives_the_same_update(overrides: list[str], train_config: Config) -> None:
    results = []
    for count in (1, 3):
        config = train_config(*STILL, "optimizer=sgd", "training.max_grad_norm=null", *overrides)
        _, batches, model, updater = setup(config)
        before = weights(model)
        update = updater(parts(batches, count), 0.5, 1)
        results.append((weights(model) - before, update))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert results[0][1].tokens == results[1][1].tokens
    torch.testing.assert_close(results[0][1].terms, results[1][1].terms, rtol=1e-4, atol=1e-4)
    assert results[0][0].abs().max() > 1e-3


def test_scaled_gradients_are_clipped_by_their_true_norm(train_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.amp.GradScaler
    results = []
    for scale in (1.0, 64.0):
        monkeypatch.setattr(torch.amp, "GradScaler", partial(scaled, real, scale))
        _, batches, model, updater = setup(train_config(*STILL, "optimizer=sgd", "training.max_grad_norm=0.1"))
        before = weights(model)
        update = updater(parts(batches, 1), 0.5, 1)
        assert update.applied
        results.append((weights(model) - before, update.gradient_norm))
    torch.testing.assert_close(results[1], results[0])
    assert results[0][1] > 0.1  # there is something to clip


def scaled(scaler: type[torch.amp.GradScaler], scale: float, device: str, enabled: bool) -> torch.amp.GradScaler:
    """A scaler that is active on a CPU, too."""
    assert not enabled
    return scaler(device, init_scale=scale, enabled=True)


def test_clipping_bounds_the_step_and_reports_the_norm_before(train_config: Config) -> None:
    _, batches, model, updater = setup(train_config(*STILL, "optimizer=sgd", "training.max_grad_norm=0.01"))
    before = weights(model)
    update = updater(parts(batches, 1), 1.0, 1)
    assert float((weights(model) - before).norm()) == pytest.approx(0.01, rel=1e-3)
    assert update.gradient_norm > 0.1


def test_a_non_finite_gradient_changes_nothing(train_config: Config) -> None:
    _, batches, model, updater = setup(train_config(*STILL))
    with torch.no_grad():
        model.output.bias[5] = torch.inf
    before = weights(model)
    update = updater(parts(batches, 1), 1.0, 1)
    assert not update.applied
    assert torch.equal(weights(model), before)


def test_a_non_finite_loss_with_a_finite_gradient_changes_nothing(
    train_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batches, model, updater = setup(train_config(*STILL))
    real = Objective.__call__

    def endless(self: Objective, *given: Any) -> Value:  # noqa: ANN401
        value = real(self, *given)
        return value._replace(total=value.total + torch.inf)

    monkeypatch.setattr(Objective, "__call__", endless)
    before = weights(model)
    update = updater(parts(batches, 2), 1.0, 1)
    assert update.gradient_norm.isfinite()
    assert not update.applied
    assert torch.equal(weights(model), before)


def test_a_non_finite_gradient_of_the_baseline_changes_nothing(train_config: Config) -> None:
    _, batches, model, updater = setup(train_config(*STILL, "attention=hard", "attention.alignment.baseline=learned"))
    assert updater.policy_parameters
    updater.policy_parameters[0].register_hook(lambda gradient: gradient * torch.inf)
    before = weights(model)
    update = updater(parts(batches, 1), 1.0, 1)
    assert update.gradient_norm.isfinite()  # that of the other parameters
    assert not update.applied
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adadelta"])
def test_every_optimizer_learns_and_takes_the_schedules_rate(optimizer: str, train_config: Config) -> None:
    _, batches, model, updater = setup(train_config(*STILL, f"optimizer={optimizer}"))
    batch = parts(batches, 1)
    rate = {"sgd": 1.0, "adadelta": 1.0}.get(optimizer, 0.01)
    losses = [float(updater(batch, rate, 1).terms["smoothed_loss"]) for _ in range(15)]
    assert losses[-1] < 0.98 * losses[0]
    assert updater.optimizer.param_groups[0]["lr"] == rate
    before = weights(model)
    updater(batch, 0.0, 1)
    assert torch.equal(weights(model), before)


def test_weight_decay_and_momentum_act(train_config: Config) -> None:
    moved = []
    for extra in ([], ["optimizer.weight_decay=0.5"], ["optimizer.momentum=0.9"]):
        _, batches, model, updater = setup(train_config(*STILL, "optimizer=sgd", *extra))
        for _ in range(2):
            updater(parts(batches, 1), 0.1, 1)
        moved.append(weights(model))
    assert not torch.equal(moved[0], moved[1])
    assert not torch.equal(moved[0], moved[2])


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adadelta"])
def test_weight_decay_is_that_of_the_papers_and_of_matrices_alone(optimizer: str, train_config: Config) -> None:
    """Of a gradient of zero nothing but the decay is left: decoupled in AdamW, else a gradient of decay * weights."""
    decay, rate, eps = 0.3, 0.1, 1e-6
    parts = [
        "attention/score=normed_additive",
        "encoder/self_attention=attention",
    ]  # a single number, a layer norm's gain
    more = [] if optimizer == "sgd" else [f"optimizer.eps={eps}"]
    config = train_config(f"optimizer={optimizer}", f"optimizer.weight_decay={decay}", *parts, *more)
    model = new_model(config, prepare(config.data, config.tokenizer).tokenizers)
    chosen = make_optimizer(config.optimizer, model)
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
            "adam": old - rate * gradient / (gradient.abs() + eps),  # whose first step is the gradient's sign
            "adamw": old - rate * decay * old,
            "sgd": old - rate * gradient,
            "adadelta": old - rate * gradient * (eps / (0.05 * gradient.square() + eps)).sqrt(),
        }[optimizer]
        decayed = parameter.dim() > 1
        torch.testing.assert_close(parameter.detach(), expected if decayed else old)
        assert decayed == (not any(part in name for part in ("bias", "gain", "norm.weight")))
    single = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    assert single == ["decoder.attention.score.gain"]


def test_every_weight_follows_the_schedule_and_is_in_one_group(train_config: Config) -> None:
    _, batches, model, updater = setup(train_config(*STILL, "optimizer=adamw", "attention=hard"))
    groups = updater.optimizer.param_groups
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(id(p) for p in model.parameters())
    updater(parts(batches, 1), 0.0123, 1)
    assert [group["lr"] for group in groups] == [0.0123, 0.0123]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]


def test_label_smoothing_changes_the_loss_but_not_the_likelihood(train_config: Config) -> None:
    seen = []
    for smoothing in (0.0, 0.3):
        _, batches, _, updater = setup(train_config(*STILL, f"training.label_smoothing={smoothing}"))
        seen.append(updater(parts(batches, 1), 0.0, 1).terms)
    torch.testing.assert_close(seen[0]["loss"], seen[1]["loss"])
    torch.testing.assert_close(seen[0]["loss"], seen[0]["smoothed_loss"])
    assert seen[1]["loss"] != seen[1]["smoothed_loss"]


def test_bf16_stays_near_fp32(train_config: Config) -> None:
    _, batches, model, updater = setup(train_config(*STILL))
    exact = updater(parts(batches, 1), 0.0, 1)
    updater.machine = Machine(torch.device("cpu"), "bf16")
    rough = updater(parts(batches, 1), 0.0, 1)
    torch.testing.assert_close(rough.terms["loss"], exact.terms["loss"], rtol=0.01, atol=0)
    torch.testing.assert_close(rough.gradient_norm, exact.gradient_norm, rtol=0.05, atol=0)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
