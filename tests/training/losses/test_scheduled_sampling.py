"""Scheduled sampling: what the decoder goes on from."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, Batches
from nmt.data.prepare import prepare
from nmt.model.checkpoints import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.training.losses.objective import Objective, ScheduledSampling
from nmt.training.losses.token_losses import likelihood

Config = Callable[..., TrainConfig]
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0"]
ALWAYS = ["training.scheduled_sampling=1", "training.scheduled_sampling_steps=1"]
PAD, BOS = 0, 2


def setup(config: TrainConfig) -> tuple[Seq2Seq, Objective, ScheduledSampling, Batch]:
    """A batch of sentences of unlike lengths, a model that likes what must never be read."""
    prepared = prepare(config.data, config.tokenizer)
    batches = Batches(prepared.splits["train"], prepared.tokenizers, batch_tokens=512, batch_sentences=None, seed=1)
    torch.manual_seed(3)
    model = new_model(config, prepared.tokenizers)
    with torch.no_grad():
        model.output.bias[PAD] = model.output.bias[BOS] = 9.0
    objective = Objective(model, config, prepared.tokenizers.target)
    assert objective.scheduled is not None
    return model, objective, objective.scheduled, batches.load(np.arange(40), 0)[0]


def best(model: Seq2Seq, batch: Batch) -> Tensor:
    """(B, T): the most probable tokens, by torch's own functions."""
    model.eval()
    decoded = model(batch.source, batch.lengths, batch.target_in)
    logits = decoded.prediction.logits(model.output.layer()).detach().clone()
    logits[..., [PAD, BOS]] = -torch.inf
    return logits.argmax(-1)


@pytest.mark.parametrize(
    "attention",
    [
        "bahdanau",
        "gnmt",
        "luong_dot decoder.fixnorm=true",
        "coverage",
        "bahdanau decoder.copy=true",
        "hard",
        "monotonic",
        "none",
        "marginal",
    ],
)
def test_at_its_height_every_word_but_the_first_is_the_models_own(attention: str, train_config: Config) -> None:
    model, _, scheduled, batch = setup(train_config(*ALWAYS, *f"attention={attention}".split(), "encoder.dropout=0.5"))
    mixed = scheduled(batch, 1)
    assert model.training
    own, given, found = best(model, batch)[:, :-1], batch.target_in, mixed.target_in
    padding = given == PAD
    assert padding.any()
    assert torch.equal(found == PAD, padding)
    assert torch.equal(found[:, 0], given[:, 0])
    assert torch.equal(found[:, 1:][~padding[:, 1:]], own[~padding[:, 1:]])
    assert (found != given)[~padding].float().mean() > 0.5
    assert mixed._replace(target_in=given) == batch


def test_the_share_of_own_words_rises_to_its_height_and_stays(train_config: Config) -> None:
    config = train_config("training.scheduled_sampling=0.4", "training.scheduled_sampling_steps=100")
    model, _, scheduled, batch = setup(config)
    assert [scheduled.probability(step) for step in (1, 50, 100, 1000)] == pytest.approx([0.004, 0.2, 0.4, 0.4])
    own = best(model, batch)[:, :-1]
    able = (own != batch.target_in[:, 1:]) & (batch.target_in[:, 1:] != PAD)  # where the difference shows
    for step, share in ((50, 0.2), (500, 0.4)):
        replaced = [(scheduled(batch, step).target_in[:, 1:] != batch.target_in[:, 1:])[able] for _ in range(10)]
        assert torch.stack(replaced).float().mean().item() == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("overrides", [[], ["training.r_drop=5"]])
def test_the_loss_is_that_of_the_given_words_after_the_mixed_ones(overrides: list[str], train_config: Config) -> None:
    model, objective, scheduled, batch = setup(train_config(*STILL, *ALWAYS, *overrides))
    value = objective(batch, 1)
    mixed = scheduled(batch, 1)
    decoded = model(batch.source, batch.lengths, mixed.target_in)
    expected = model.loss(decoded.prediction, batch.target_out, PAD, partial(likelihood, smoothing=0.1))
    torch.testing.assert_close(value.terms["loss"], expected.terms["loss"].sum())
    torch.testing.assert_close(value.terms["smoothed_loss"], expected.total.detach())
    objective.scheduled = None
    assert objective(batch, 1).terms["loss"] != pytest.approx(expected.terms["loss"].sum().item(), rel=1e-4)


def test_under_autocast_its_pass_leaves_no_copies_of_weights(train_config: Config) -> None:
    """They would have no gradient (pytorch issue 65766)."""
    model, _, scheduled, batch = setup(train_config(*STILL, *ALWAYS))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        scheduled(batch, 1)
        model.bridge.proj.weight.zero_()
        first = model.encode(batch.source, batch.lengths).hypothesis.recurrent.hidden[0]
    torch.testing.assert_close(first.float(), model.bridge.proj.bias.tanh().expand_as(first), atol=1e-2, rtol=0)


def test_at_zero_there_is_one_pass(train_config: Config) -> None:
    config = train_config()
    prepared = prepare(config.data, config.tokenizer)
    assert Objective(new_model(config, prepared.tokenizers), config, prepared.tokenizers.target).scheduled is None
