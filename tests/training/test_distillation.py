"""Distillation: the loss with teachers, which runs may be teachers, and what the manifest records of them."""

import json
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
from conftest import tiny_config
from fitting import first_batch, same, state, stopped, trainer_of, weights
from torch.nn import functional as F

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch
from nmt.model.output import Readouts
from nmt.training.job import train
from nmt.training.losses import Distillation, InferenceGradient, Objective

SHORT = ["training.max_steps=3", "validation.unit=steps", "validation.every=3"]
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "training.label_smoothing=0"]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Train two teachers with different attentions, seeds and sizes, and with dropout; one copies."""
    runs = [tmp_path_factory.mktemp("teacher") / str(seed) for seed in (1, 2)]
    kinds = ["attention=bahdanau", "decoder.copy=true"], ["attention=gnmt", "seed=2"]
    for run, own in zip(runs, kinds, strict=True):
        assert train(tiny_config(*SHORT, *own), run) == 0
    return runs


def from_(runs: list[Path], *more: str) -> list[str]:
    return ["objective=distillation", f"objective.teachers=[{','.join(map(str, runs))}]", *more]


def setup(config: TrainConfig) -> tuple[Objective, Batch]:
    """Build the objective of a run, and load a batch."""
    trainer = trainer_of(config)
    return trainer.objective, first_batch(trainer)


def test_the_mean_of_all_teachers_is_learned_without_their_dropout(teachers: list[Path]) -> None:
    objective, batch = setup(tiny_config(*STILL, *from_(teachers, "objective.teacher_weight=0.75")))
    kept: list[bool] = []
    models = cast(Distillation, objective.token_loss).teachers
    hooks = [model.register_forward_hook(lambda *_: kept.append(torch.is_grad_enabled())) for model in models]
    value = objective(batch, 1)
    for hook in hooks:
        hook.remove()
    assert kept == [False, False]  # autograd keeps nothing of the teachers' passes
    real = batch.target_out != objective.token_loss.pad
    taught = torch.zeros(())
    for teacher in models:
        assert not teacher.training
        decoded = teacher(batch.source, batch.lengths, batch.target_in)
        taught = taught + decoded.prediction.logits(teacher.output.layer())[real].softmax(-1) / len(teachers)
    own = objective.model(batch.source, batch.lengths, batch.target_in)
    log_probs = objective.model.output(own.readouts)[real].log_softmax(-1)
    divergence = F.kl_div(log_probs, taught.detach(), reduction="sum")
    loss = F.nll_loss(log_probs, batch.target_out[real], reduction="sum")
    torch.testing.assert_close(value.terms["distillation_loss"], divergence.detach())
    torch.testing.assert_close(value.terms["loss"], loss.detach())
    torch.testing.assert_close(value.total, 0.25 * loss + 0.75 * divergence)
    value.total.backward()
    assert all(parameter.grad is None for teacher in models for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in objective.model.parameters())


def test_the_references_are_smoothed_the_teachers_are_not(teachers: list[Path]) -> None:
    objective, batch = setup(tiny_config(*STILL, "training.label_smoothing=0.2", *from_(teachers[:1])))
    value = objective(batch, 1)
    assert value.terms["smoothed_loss"] != value.terms["loss"]
    half = (value.terms["smoothed_loss"] + value.terms["distillation_loss"]) / 2
    torch.testing.assert_close(value.total.detach(), half)


def test_the_baseline_of_a_sampled_position_has_the_loss_of_the_students_own_objective(teachers: list[Path]) -> None:
    sampled = ["attention=variational", "attention.alignment.dim=8", "attention.alignment.estimator=sample"]
    objective, batch = setup(tiny_config(*STILL, *sampled, *from_(teachers[:1])))
    (gradient,) = (loss for loss in objective.auxiliary if isinstance(loss, InferenceGradient))
    prediction = objective.token_loss(batch)
    assert gradient(prediction)[0].abs() > 1e-3
    # With the reward of soft attention, which is the baseline, no position is better than expected.
    soft = prediction.decoded._replace(prediction=Readouts(prediction.decoded.readouts))
    terms = objective.token_loss.of_decoded(batch, soft, batch.target_out).terms
    assert gradient(prediction._replace(terms=terms))[0].abs() < 1e-3


@pytest.mark.slow
def test_a_run_goes_on_in_the_same_bits_where_its_teachers_have_moved(teachers: list[Path], tmp_path: Path) -> None:
    config = tiny_config(*SHORT, *from_(teachers))
    assert train(config, tmp_path / "whole") == 0
    assert state(stopped(config, tmp_path / "stopped", 2))["step"] == 2
    moved = [shutil.copytree(run, tmp_path / "moved" / run.name) for run in teachers]
    for others in (moved[::-1], moved[:1]):
        with pytest.raises(UserError, match=r"this run began with step 3 of .*/1, step 3 of .*/2; name those"):
            train(tiny_config(*SHORT, *from_(others)), tmp_path / "stopped")
    assert train(tiny_config(*SHORT, *from_(moved)), tmp_path / "stopped") == 0
    starts = json.loads((tmp_path / "stopped" / "manifest.json").read_text())["starts"]
    for start, runs in zip(starts, (teachers, moved), strict=True):
        recorded = [(teacher["run"], teacher["step"], teacher["scores"]) for teacher in start["teachers"]]
        best = [state(run, "best") for run in teachers]
        assert recorded == [(str(run), one["step"], one["scores"]) for run, one in zip(runs, best, strict=True)]
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_a_teacher_with_another_tokenizer_is_refused(teachers: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"was trained with another tokenizer .* models are in {teachers[0]}$"):
        train(tiny_config(*SHORT, *from_(teachers[:1], "tokenizer.vocab_size=390")), tmp_path / "run")
    assert not list(tmp_path.glob("run/*"))
