"""Recorded passes, with a stand-in for CUDA graphs that computes on the CPU."""

import gc
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config
from fitting import trainer_of

from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch
from nmt.training.cuda_graphs import GraphedPasses, padded_shape
from nmt.training.losses import Value
from nmt.training.trainer import OutOfMemory, Trainer, Update

STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "training.max_grad_norm=null"]
STILL += ["optimizer=sgd", "optimizer.lr=0.05", "schedule=constant", "schedule.warmup_steps=0"]


class Recomputing:
    """Stands in for the recorder of CUDA graphs: each launch computes again, and writes into the recorded tensors."""

    def __init__(self, parameters: list[torch.nn.Parameter], fails_after: int | None = None) -> None:
        self.parameters, self.fails_after = parameters, fails_after
        self.recorded = self.launched = 0

    def compute(self, passes: Callable[[], Value]) -> Value:
        return passes()

    def record(self, passes: Callable[[], Value]) -> tuple[Value, Callable[[], None]]:
        if self.recorded == self.fails_after:
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors ...")
        self.recorded += 1
        gradients = [None if each.grad is None else each.grad.clone() for each in self.parameters]
        value = passes()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if parameter.grad is not None and gradient is not None:
                parameter.grad.copy_(gradient)

        def launch() -> None:
            self.launched += 1
            again = passes()
            value.total.copy_(again.total)
            for name, term in again.terms.items():
                value.terms[name].copy_(term)

        return value, launch


class Training:
    """Updates of one model on the first batches of the demo corpus."""

    def __init__(self, config: TrainConfig, limit: int | None = None, fails_after: int | None = None) -> None:
        """limit: the most recordings; with None, nothing is recorded and no batch padded for it."""
        self.trainer = trainer_of(config)
        assert self.trainer.graphed is None  # a CPU has no CUDA graphs
        self.model, self.batches = self.trainer.model.train(), self.trainer.batches
        parameters = [*self.model.parameters()]
        self.recorder = Recomputing(parameters, fails_after)
        if limit is not None:
            timed = partial(self.trainer.timed, "recording")
            pads = [tokenizer.pad for tokenizer in self.batches.tokenizers]
            passes = self.trainer.forward_backward, parameters, pads
            self.trainer.graphed = GraphedPasses(*passes, torch.device("cpu"), limit, self.recorder, timed)
        shapes = {padded_shape(self.batches.load(part, 0, 1)[0]): part for part in self.batches.epoch(0)}
        self.plan = [*shapes.values()][:3]  # of three shapes

    def update(self, step: int, parts: int = 1) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Make an update, and return its loss terms and gradient norm."""
        batches = self.batches.load(self.plan[step % len(self.plan)], 0, parts)
        done = self.trainer.update(batches)
        assert done.applied
        return done.terms, done.gradient_norm

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def batch_of(rows: int, source: int, target: int) -> Batch:
    ids = [torch.randint(4, 50, (rows, length)) for length in (source, target, target)]
    lengths = torch.full((rows,), source)
    return Batch(np.arange(rows), ids[0], lengths, ids[1], ids[2], rows * target)


def test_shapes_are_few_and_not_much_larger() -> None:
    rows = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 7: 8, 64: 64, 65: 96, 97: 128, 400: 512}
    assert {count: padded_shape(batch_of(count, 8, 9)) for count in rows} == {
        count: (expected, 8, 16) for count, expected in rows.items()
    }


# Together these cover fixed contexts, local windows, heads, attention that reads its past, latent positions, and all
# kinds of decoder and regularisation.
QUICK = "attention=coverage attention.coverage.loss_start=1 decoder.copy=true"
OTHERS = [
    "attention=luong_dot embedding.tie_output=false training.guided_alignment=0.3",
    "attention=none",
    "attention=multihead encoder/self_attention=attention",
    "attention=marginal decoder.lexical=true",
    "attention=luong_local_p",
    "attention=gnmt encoder.hidden=16",
    "attention=variational",
    "attention=hard_monotonic",
    "attention=nematus encoder.layers=2 encoder.residual=true decoder.bridge=mean",
    "attention=luong_dot training.r_drop=1",
]
MODELS = [QUICK, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)]


@pytest.mark.parametrize("overrides", MODELS)
def test_recorded_updates_are_those_of_plain_passes(overrides: str) -> None:
    """Recording starts at the second update, when the parameters with gradients are known; with a coverage loss, when
    this loss starts.
    """
    config = tiny_config(*STILL, *overrides.split())
    plain, recorded = Training(config), Training(config, limit=2)
    for training in (plain, recorded):
        if not config.embedding.tie_output:
            training.model.source_embedding.requires_grad_(False)  # tests a parameter without gradient
    parts = 3 if overrides == "attention=none" else 1
    first = 5 if "loss_start" in overrides else 2
    for step in range(1, 11):
        (terms, norm), (expected, expected_norm) = recorded.update(step, parts), plain.update(step, parts)
        torch.testing.assert_close(terms, expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-3, atol=1e-5)
        assert recorded.recorder.recorded == 0 or step >= first
    torch.testing.assert_close(recorded.weights(), plain.weights(), rtol=1e-3, atol=1e-5)
    assert recorded.recorder.recorded == 2
    assert recorded.recorder.launched > 1
    assert recorded.trainer.seconds_of["recording"] > plain.trainer.seconds_of["recording"] == 0
    if not config.embedding.tie_output:
        assert recorded.model.source_embedding.weight.grad is None


def test_a_recording_that_fails_is_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(*STILL)
    plain, recorded = Training(config), Training(config, limit=40, fails_after=1)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 12):
            recorded.update(step)
            plain.update(step)
    torch.testing.assert_close(recorded.weights(), plain.weights(), rtol=1e-3, atol=1e-5)
    assert recorded.recorder.recorded == 1
    messages = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert len(messages) == 1
    assert messages[0].endswith("operation not permitted when stream is capturing")


@pytest.mark.slow
def test_an_update_that_is_skipped_leaves_no_gradient() -> None:
    config = tiny_config(*STILL)
    plain, recorded = Training(config), Training(config, limit=40)
    for training in (plain, recorded):
        for step in range(1, 9):
            if step == 6:
                with torch.no_grad():
                    training.model.output.bias[5] = torch.inf
                batches = training.batches.load(training.plan[0], 0)
                assert not training.trainer.update(batches).applied
                with torch.no_grad():
                    training.model.output.bias[5] = 0.0
            else:
                training.update(step)
    torch.testing.assert_close(recorded.weights(), plain.weights(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_without_memory_for_recordings_updates_go_on_without_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(*STILL)
    plain, recorded = Training(config), Training(config, limit=40)

    def update(batches: list[Batch], *others: Any) -> Update:  # noqa: ANN401
        if recorded.trainer.step == 7 and recorded.trainer.graphed is not None:
            raise OutOfMemory
        return Trainer.update(recorded.trainer, batches, *others)

    monkeypatch.setattr(recorded.trainer, "update", update)
    for training in (plain, recorded):
        training.trainer.plan = training.plan * 4
    for _ in range(10):
        recorded.trainer.next_update()
        plain.trainer.next_update()
    assert recorded.recorder.launched > 0
    assert recorded.trainer.graphed is None
    assert recorded.trainer.memory.too_many == math.inf  # no batch was split to save memory
    assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == [
        "step 8: out of memory: from now on without CUDA graphs"
    ]
    torch.testing.assert_close(recorded.weights(), plain.weights(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        "attention=hard attention.alignment.baseline=learned",
        pytest.param("attention=variational attention.alignment.estimator=sample", marks=pytest.mark.slow),
    ],
)
def test_draws_of_sentences_are_not_recorded(overrides: str) -> None:
    training = Training(tiny_config(*STILL, *overrides.split()), limit=40)
    for step in range(1, 5):
        training.update(step)
    assert training.recorder.recorded == 0


@pytest.mark.parametrize(
    "overrides",
    ["attention=bahdanau", pytest.param("attention=posterior training.accumulate=2", marks=pytest.mark.slow)],
)
def test_passes_leave_no_cycles_of_references(overrides: str) -> None:
    """In a cycle, tensors and autograd nodes of another CUDA stream would live until the garbage collector runs."""
    training = Training(tiny_config(*overrides.split()))
    training.update(1)
    gc.collect()
    gc.disable()
    try:
        training.update(2)
        assert gc.collect() == 0
    finally:
        gc.enable()
