"""The objective of variational attention: its terms, and the sampled estimator against the enumerated gradient."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, Batches
from nmt.data.prepare import prepare
from nmt.model import latent
from nmt.model.checkpoints import new_model
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import sentence_draws
from nmt.training.losses.objective import Objective

Config = Callable[..., TrainConfig]
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "training.label_smoothing=0"]
VARIATIONAL = ["attention=variational", "attention.alignment.dim=8", *STILL]
ALL = ["attention.alignment.top_k=null", "attention.alignment.min_share=0"]
SAMPLE = "attention.alignment.estimator=sample"


def setup(config: TrainConfig, sentences: int = 6) -> tuple[Seq2Seq, Objective, Batch]:
    prepared = prepare(config.data, config.tokenizer)
    batches = Batches(prepared.splits["train"], prepared.tokenizers, batch_tokens=512, batch_sentences=None, seed=1)
    torch.manual_seed(3)
    model = new_model(config, prepared.tokenizers)
    return model, Objective(model, config, prepared.tokenizers.target), batches.load(np.arange(sentences), 0)[0]


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_divergence_is_added_with_its_weight(weight: float, train_config: Config) -> None:
    _, objective, batch = setup(train_config(*VARIATIONAL, f"attention.alignment.kl_weight={weight}"))
    value = objective(batch, 1)
    assert set(value.terms) == {"loss", "smoothed_loss", "kl_loss"}
    assert value.terms["kl_loss"] > 0
    torch.testing.assert_close(value.total.detach(), value.terms["loss"] + weight * value.terms["kl_loss"])


@pytest.mark.parametrize("normalizer", ["softmax", "linear_chain"])
def test_the_bound_is_below_the_likelihood(normalizer: str, train_config: Config) -> None:
    model, objective, batch = setup(train_config(*VARIATIONAL, *ALL, f"attention/normalizer={normalizer}"))
    bound = -float(objective(batch, 1).total.detach())
    predictions = model(batch.source, batch.lengths, batch.target_in).prediction
    assert bound < float(model.log_probs(predictions, batch.target_out, 0).sum())


def test_the_sampled_gradient_has_the_enumerated_one_as_its_mean(train_config: Config) -> None:
    """Of the inference network and the output layer, over copies of one sentence, within 4.5 standard deviations."""
    exact_model, exact, batch = setup(train_config(*VARIATIONAL, *ALL), sentences=1)
    model, sampled, _ = setup(train_config(*VARIATIONAL, *ALL, SAMPLE))
    model.load_state_dict(exact_model.state_dict())
    names = ["inference.score.key_proj.weight", "output.bias"]

    def gradients(objective: Objective, own: Seq2Seq, copies: int) -> list[Tensor]:
        many = Batch(
            np.arange(copies),
            *(part.repeat(copies, *[1] * (part.dim() - 1)) for part in batch[1:5]),
            batch.target_tokens * copies,
        )
        own.zero_grad(set_to_none=True)
        with sentence_draws(None):
            objective(many, step=gradients.calls).total.backward()
        gradients.calls += 1
        return [dict(own.named_parameters())[name].grad.double() / copies for name in names]

    gradients.calls = 1
    wanted = gradients(exact, exact_model, 1)
    draws = [gradients(sampled, model, 100) for _ in range(40)]
    for n, expected in enumerate(wanted):
        samples = torch.stack([draw[n] for draw in draws])
        mean, deviation = samples.mean(0), samples.std(0) / len(samples) ** 0.5
        assert ((mean - expected).abs() <= 4.5 * deviation + 1e-5).all()
        assert deviation.norm() < 0.3 * expected.norm()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_the_mean_over_all_samples_is_the_enumerated_gradient(
    smoothing: float, train_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of all parameters: every combination of positions of a target of two tokens, with its probability."""
    smoothed = [*VARIATIONAL, *ALL, f"training.label_smoothing={smoothing}"]
    exact_model, exact, batch = setup(train_config(*smoothed), sentences=1)
    model, sampled, _ = setup(train_config(*smoothed, SAMPLE))
    model.load_state_dict(exact_model.state_dict())
    batch = batch._replace(target_in=batch.target_in[:, :2], target_out=batch.target_out[:, :2], target_tokens=2)
    exact_model.double()
    model.double()
    exact(batch, 1).total.backward()
    wanted = {name: parameter.grad for name, parameter in exact_model.named_parameters()}
    S = batch.source.shape[1]
    mean = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    probabilities = []

    for positions in itertools.product(range(S), repeat=2):

        def chosen(q: Tensor, _: Tensor, positions: tuple[int, ...] = positions) -> Tensor:
            choice = functional.one_hot(torch.tensor([positions]), S).to(q.dtype)
            probabilities.append(float((q.detach() * choice).sum(-1).prod()))
            return choice

        monkeypatch.setattr(latent, "sample_positions", chosen)
        model.zero_grad()
        sampled(batch, 1).total.backward()
        for name, parameter in model.named_parameters():
            mean[name] += probabilities[-1] * parameter.grad
    assert sum(probabilities) == pytest.approx(1)
    for name, gradient in wanted.items():
        torch.testing.assert_close(mean[name], gradient, rtol=1e-6, atol=1e-9)


def test_sampling_adds_a_loss_of_the_inference_network_alone(train_config: Config) -> None:
    model, objective, batch = setup(train_config(*VARIATIONAL, SAMPLE))
    value = objective(batch, 1)
    assert set(value.terms) == {"loss", "smoothed_loss", "kl_loss", "inference_loss"}
    sampler = objective.auxiliary[1]
    prediction = objective.loss(batch)
    sampler(prediction, 1).total.backward()
    touched = {name.partition(".")[0] for name, each in model.named_parameters() if each.grad is not None}
    assert "inference" in touched
    assert not touched & {"decoder", "bridge"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=variational", "attention/normalizer=sparsemax"], "needs the logarithms of the distribution"),
        (["attention=variational", "training.r_drop=1"], "needs two passes that train on the same positions"),
        (["attention=marginal", "attention/projection=heads"], "needs a single head, over whose positions it sums"),
        (["attention=monotonic", "attention/alignment=marginal"], "needs a distribution over positions"),
        (["attention=mocha", "attention/alignment=sampled"], "needs a distribution over positions"),
        (
            ["attention=luong_general", "decoder.input_feeding=false", "attention/alignment=posterior"],
            "needs later steps that read what it changes",
        ),
        (
            ["attention=marginal", "decoder.input_feeding=false", "attention.dropout=0.1"],
            "needs a decoder that reads the mean context",
        ),
        (["attention=posterior", "attention/coverage=linear"], "needs a coverage of distributions"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], message: str, train_config: Config) -> None:
    with pytest.raises(UserError, match=message):
        train_config(*overrides)
