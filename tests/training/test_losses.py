"""The objective: R-Drop, the loss terms of the attention, and the bound of variational attention."""

import itertools
import math

import pytest
import torch
from conftest import tiny_config
from fitting import first_batch, trainer_of
from torch import Tensor
from torch.nn import functional

from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import Past
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch
from nmt.model import latent
from nmt.model.seq2seq import Seq2Seq
from nmt.training.losses import Objective, coverage_loss, guided_alignment_loss

MOVING = "attention.alignment.baseline=moving"
VARIATIONAL = ["attention=variational", "attention.alignment.dim=8"]
ALL = ["attention.alignment.top_k=null", "attention.alignment.min_share=0"]
SAMPLE = "attention.alignment.estimator=sample"
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "training.label_smoothing=0"]


def setup(config: TrainConfig) -> tuple[Seq2Seq, Objective, Batch]:
    """Build a model and its objective, and load the first batch of an epoch."""
    trainer = trainer_of(config)
    return trainer.model, trainer.objective, first_batch(trainer)


@pytest.mark.parametrize(
    ("overrides", "term", "weight"),
    [
        (
            ["attention=coverage", "attention.coverage.loss_weight=2.5", "attention.coverage.loss_start=0"],
            "coverage_loss",
            2.5,
        ),
        (["training.guided_alignment=0.7"], "alignment_loss", 0.7),
        (["attention=hard", "attention.alignment.weight=0.3", MOVING], "policy_loss", 0.3),
        ([*VARIATIONAL, "attention.alignment.kl_weight=0.3"], "kl_loss", 0.3),
    ],
)
def test_a_term_is_added_with_its_weight(overrides: list[str], term: str, weight: float) -> None:
    _, objective, batch = setup(tiny_config(*STILL, *overrides))
    value = objective(batch, 1)
    assert set(value.terms) >= {"loss", "smoothed_loss", term}
    torch.testing.assert_close(value.total, value.terms["smoothed_loss"] + weight * value.terms[term])
    assert value.terms[term] != 0
    assert not value.terms[term].requires_grad


@pytest.mark.parametrize("overrides", [[], ["attention=coverage", "attention.coverage.loss_weight=0"]])
def test_without_a_weight_nothing_is_added(overrides: list[str]) -> None:
    _, objective, batch = setup(tiny_config(*STILL, *overrides))
    value = objective(batch, 1)
    assert set(value.terms) == {"loss", "smoothed_loss"}
    assert batch.alignment is None
    torch.testing.assert_close(value.total.detach(), value.terms["loss"])


def test_a_coverage_loss_sets_in_after_its_start() -> None:
    _, objective, batch = setup(tiny_config(*STILL, "attention=coverage", "attention.coverage.loss_start=5"))
    early, late = objective(batch, 5), objective(batch, 6)
    torch.testing.assert_close(early.total, early.terms["smoothed_loss"])
    torch.testing.assert_close(late.total, late.terms["smoothed_loss"] + late.terms["coverage_loss"])


def gradient(model: Seq2Seq, total: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_what_dropout_makes_differ_is_added_by_half_of_alpha() -> None:
    _, objective, batch = setup(tiny_config("training.r_drop=3", "embedding.dropout=0.3"))
    value = objective(batch, 1)
    assert set(value.terms) == {"loss", "smoothed_loss", "r_drop_loss"}
    assert value.terms["r_drop_loss"] > 1
    expected = value.terms["smoothed_loss"] + 3 / 2 * value.terms["r_drop_loss"]
    torch.testing.assert_close(value.total.detach(), expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.label_smoothing=0.1"],
        ["attention=luong_general", "training.guided_alignment=0.7"],
        ["attention=coverage", "attention.coverage.loss_start=0"],
    ],
)
def test_without_dropout_r_drop_changes_nothing(overrides: list[str]) -> None:
    """The predictions of both passes are equal; tokens and the attention's loss terms are counted once."""
    found = []
    for alpha in (0, 5):
        model, objective, batch = setup(tiny_config(*STILL, *overrides, f"training.r_drop={alpha}"))
        value = objective(batch, 1)
        found.append((value.total, value.terms, gradient(model, value.total)))
    (total, terms, plain), (total_both, terms_both, both) = found
    assert terms_both.pop("r_drop_loss").abs() < 1e-3
    torch.testing.assert_close(total_both, total)
    torch.testing.assert_close(terms_both, terms)
    torch.testing.assert_close(both, plain, rtol=1e-4, atol=1e-4)


def test_the_policy_sees_the_likelihood_of_each_token_and_not_of_padding() -> None:
    model, objective, batch = setup(tiny_config(*STILL, "attention=hard", "attention.alignment.soft_share=0"))
    seen = {}
    assert model.policy is not None
    original = model.policy.forward

    def spy(choice: object, log_probs: torch.Tensor, real: torch.Tensor) -> object:
        seen.update(log_probs=log_probs, real=real)
        return original(choice, log_probs, real)  # type: ignore[arg-type]

    model.policy.forward = spy  # type: ignore[assignment,method-assign]
    value = objective(batch, 1)
    torch.testing.assert_close(-seen["log_probs"].sum(), value.terms["loss"])
    assert (seen["log_probs"] < 0).equal(batch.target_out != 0)
    assert torch.equal(seen["real"], batch.target_out != 0)


def test_a_baseline_neither_uses_up_the_gradients_limit_nor_depends_on_the_policys_weight() -> None:
    still = [*STILL, "optimizer=sgd", "optimizer.lr=1e-9"]
    trainer = trainer_of(tiny_config(*still, "attention=hard", "attention.alignment.weight=0.1"))
    model, batch = trainer.model, first_batch(trainer)
    assert model.policy is not None
    assert model.policy.learned is not None
    apart = {id(parameter) for parameter in model.policy.parameters()}
    assert {id(parameter) for parameter in trainer.policy_parameters} == apart
    assert not apart & {id(parameter) for parameter in trainer.parameters}
    with torch.no_grad():
        model.policy.learned.bias.fill_(1000.0)
    huge = trainer.update([batch]).gradient_norm
    with torch.no_grad():
        model.policy.learned.bias.fill_(-5.0)
    near = trainer.update([batch]).gradient_norm
    assert huge < 100 * near  # grows with the advantage, not with its square
    gradients = [parameter.grad for parameter in trainer.policy_parameters if parameter.grad is not None]
    assert torch.stack([gradient.norm() for gradient in gradients]).norm() <= 1.001


@pytest.mark.parametrize("baseline", ["learned", "moving"])
def test_before_training_the_baseline_is_near_the_rewards(baseline: str) -> None:
    model, _, batch = setup(tiny_config(*STILL, "attention=hard", f"attention.alignment.baseline={baseline}"))
    decoded = model(batch.source, batch.lengths, batch.target_in)
    rewards = model.log_probs(decoded.prediction, batch.target_out, 0)
    assert decoded.attention is not None
    assert decoded.attention.choice is not None
    choice = decoded.attention.choice._replace(log_prob=torch.ones_like(rewards), entropy=torch.zeros_like(rewards))
    assert model.policy is not None
    advantage = -model.policy(choice, rewards, batch.target_out != 0).loss / batch.target_tokens
    assert abs(advantage) < 0.2 * abs(rewards.sum() / batch.target_tokens)


@pytest.mark.parametrize("normalizer", ["softmax", "linear_chain"])
def test_the_bound_is_below_the_likelihood(normalizer: str) -> None:
    model, objective, batch = setup(tiny_config(*STILL, *VARIATIONAL, *ALL, f"attention/normalizer={normalizer}"))
    bound = -float(objective(batch, 1).total.detach())
    predictions = model(batch.source, batch.lengths, batch.target_in).prediction
    assert bound < float(model.log_probs(predictions, batch.target_out, 0).sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_mean_over_all_samples_is_the_enumerated_gradient(
    smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, enumerates all positions of a target of two tokens, and compares the gradients of all parameters."""
    smoothed = [*STILL, *VARIATIONAL, *ALL, f"training.label_smoothing={smoothing}"]
    exact_model, exact, batch = setup(tiny_config(*smoothed, "training.batch_sentences=1"))
    model, sampled, _ = setup(tiny_config(*smoothed, SAMPLE))
    model.load_state_dict(exact_model.state_dict())
    batch = batch._replace(
        source=batch.source[:, -5:],
        lengths=torch.tensor([5]),
        target_in=batch.target_in[:, :2],
        target_out=batch.target_out[:, :2],
        target_tokens=2,
    )
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


def test_sampling_adds_a_loss_of_the_inference_network_alone() -> None:
    model, objective, batch = setup(tiny_config(*STILL, *VARIATIONAL, SAMPLE))
    value = objective(batch, 1)
    assert set(value.terms) == {"loss", "smoothed_loss", "kl_loss", "inference_loss"}
    sampler = objective.auxiliary[1]
    prediction = objective.token_loss(batch)
    sampler(prediction)[0].backward()
    touched = {name.partition(".")[0] for name, each in model.named_parameters() if each.grad is not None}
    assert "inference" in touched
    assert not touched & {"decoder", "bridge"}


def test_coverage_loss_is_the_overlap_with_what_came_before() -> None:
    weights, expected = torch.rand(2, 4, 5, dtype=torch.float64).softmax(-1), 0.0
    real = torch.arange(4) < torch.tensor([4, 2])[:, None]
    for b, t in real.nonzero().tolist():
        for s in range(5):
            expected += min(float(weights[b, t, s]), float(weights[b, :t, s].sum()))
    torch.testing.assert_close(float(coverage_loss(weights, real)), expected, rtol=1e-12, atol=0)


def test_guided_alignment_is_the_cross_entropy_of_given_rows() -> None:
    log_weights = torch.rand(2, 4, 5, dtype=torch.float64).log_softmax(-1)
    given = torch.zeros(2, 4, 5, dtype=torch.float64)
    given[0, 1, 2], given[1, 0, :2] = 1.0, 0.5
    expected = -log_weights[0, 1, 2] - 0.5 * log_weights[1, 0, :2].sum()
    torch.testing.assert_close(guided_alignment_loss(log_weights, given), expected)


def test_guided_alignment_passes_over_what_a_window_excludes() -> None:
    log_weights = torch.tensor([[[0.0, -torch.inf]]], requires_grad=True)
    loss = guided_alignment_loss(log_weights, torch.tensor([[[0.0, 1.0]]]))
    loss.backward()
    assert loss == 0
    assert log_weights.grad is not None
    assert not log_weights.grad.any()


@pytest.mark.parametrize("gap", [1.0, 60.0, 95.0, 110.0, 1e4])
def test_guided_alignment_has_the_exact_gradient_however_small_the_weight(gap: float) -> None:
    """The gradient is p - reference, also if the weight is subnormal in float32 (gap 95) or zero (gap 110)."""
    normalizer, keep = SoftmaxNormalizer(), torch.ones(1, 1, 3, dtype=torch.bool)
    normalizer.with_log_weights = True
    energies = torch.tensor([[[gap + 1, 0.0, gap]]], requires_grad=True)
    log_weights = normalizer(energies, keep, Past.initial(keep[:, 0])).log_weights
    loss = guided_alignment_loss(log_weights, torch.tensor([[[0.0, 1.0, 0.0]]]))
    (gradient,) = torch.autograd.grad(loss, energies)
    expected = energies[0, 0].detach().double().softmax(-1) - torch.tensor([0.0, 1.0, 0.0]).double()
    torch.testing.assert_close(gradient[0, 0].double(), expected, rtol=1e-6, atol=1e-6)
    assert float(loss.detach()) == pytest.approx(gap + 1 + math.log1p(math.exp(-1) + math.exp(-gap - 1)))
