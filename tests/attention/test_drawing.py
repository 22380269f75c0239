"""Alignments that draw a position in training: the distribution of the draws, what they return, and the gradients.

Frequencies and means over N draws are compared within 4.5 of their standard deviations.
Shapes: N draws, S source positions.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from nmt.attention.alignment import Aligned, Alignment, SampledAlignment, StraightThroughAlignment
from nmt.attention.memory import Past
from nmt.attention.normalizers import Normalized, SoftmaxNormalizer

N = 40_000
ENERGIES = torch.tensor([0.3, -1.0, 1.2, 5.0, 0.0]).double()
KEEP = torch.tensor([True, True, True, False, True])
BOTH = pytest.mark.parametrize(
    "alignment", [SampledAlignment(0.0), StraightThroughAlignment(1.0)], ids=["sampled", "straight_through"]
)
PROBS = torch.tensor([0.3, -1.0, 1.2, -torch.inf, 0.0]).double().softmax(0)


def softmax(energies: Tensor, keep: Tensor = KEEP, times: int = N, log_weights: bool = False) -> Normalized:
    """(S,) -> the same distribution (1, N, S) this many times."""
    normalizer = SoftmaxNormalizer()
    normalizer.with_log_weights = log_weights
    distribution: Normalized = normalizer(energies.expand(1, times, -1), keep.expand(1, 1, -1), Past.start(keep[None]))
    return distribution


def draw(alignment: Alignment, energies: Tensor = ENERGIES, times: int = N) -> Aligned:
    """(S,) -> the weights (1, N, S) of this many draws."""
    aligned: Aligned = alignment.train()(softmax(energies, times=times))
    return aligned


@pytest.mark.parametrize(
    "alignment",
    [SampledAlignment(0.0), StraightThroughAlignment(0.5), StraightThroughAlignment(2.0)],
    ids=["sampled", "gumbel-sharp", "gumbel-flat"],
)
def test_a_position_is_drawn_with_its_probability(alignment: Alignment) -> None:
    """The temperature is of the gradient alone."""
    weights = draw(alignment).weights[0]
    assert torch.equal(weights, torch.eye(5).double()[weights.argmax(-1)])  # exactly one-hot
    deviation = (PROBS * (1 - PROBS) / N).sqrt()
    assert ((weights.mean(0) - PROBS).abs() <= 4.5 * deviation).all()


@pytest.mark.parametrize(
    "alignment", [SampledAlignment(0.0), StraightThroughAlignment(1.0)], ids=["sampled", "straight_through"]
)
def test_draws_are_independent(alignment: Alignment) -> None:
    """Of two positions in a row the pairs are as frequent as the product of their probabilities."""
    drawn = draw(alignment).weights[0].argmax(-1).view(-1, 2)
    pairs = torch.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25).view(5, 5) / len(drawn)
    expected = PROBS[:, None] * PROBS
    assert ((pairs - expected).abs() <= 4.5 * (expected * (1 - expected) / len(drawn)).sqrt()).all()


def test_log_prob_is_that_of_the_position_drawn_and_entropy_that_of_the_distribution() -> None:
    weights, log_prob, entropy = draw(SampledAlignment(0.0), times=50)
    assert log_prob is not None
    assert entropy is not None
    torch.testing.assert_close(log_prob[0], PROBS[weights[0].argmax(-1)].log())
    probs = PROBS[KEEP]
    torch.testing.assert_close(entropy, -(probs * probs.log()).sum().expand(1, 50))


def test_log_prob_and_entropy_are_differentiable() -> None:
    energies = ENERGIES.clone().requires_grad_()
    drawn, log_prob, entropy = draw(SampledAlignment(0.0), energies, times=1)
    assert log_prob is not None
    assert entropy is not None
    (gradient,) = torch.autograd.grad(log_prob.sum(), [energies], retain_graph=True)
    torch.testing.assert_close(gradient, drawn[0, 0] - PROBS)  # of log softmax
    (gradient,) = torch.autograd.grad(entropy.sum(), [energies])
    surprise = torch.where(KEEP, -PROBS.log(), 0.0)
    torch.testing.assert_close(gradient, PROBS * (surprise - (PROBS * surprise).sum()))


def test_nothing_is_differentiated_through_a_draw() -> None:
    energies = ENERGIES.clone().requires_grad_()
    assert not draw(SampledAlignment(0.0), energies, times=5).weights.requires_grad


def test_the_expected_share_of_steps_takes_the_softmax_and_is_no_draw() -> None:
    energies = ENERGIES.clone().requires_grad_()
    weights, log_prob, entropy = draw(SampledAlignment(0.3), energies)
    assert log_prob is not None
    assert entropy is not None
    soft = (weights[0] < 1).all(-1)
    assert abs(soft.double().mean().item() - 0.3) <= 4.5 * (0.3 * 0.7 / N) ** 0.5
    torch.testing.assert_close(weights[0, soft], PROBS.expand(int(soft.sum()), -1))
    assert not log_prob[0, soft].any()
    assert (log_prob[0, ~soft] < 0).all()
    assert torch.equal(entropy, entropy[:, :1].expand_as(entropy))
    frequencies = weights[0, ~soft].mean(0)
    assert ((frequencies - PROBS).abs() <= 4.5 * (PROBS * (1 - PROBS) / (~soft).sum()).sqrt()).all()
    (gradient,) = torch.autograd.grad(weights[0, soft][:, 0].mean(), [energies])
    torch.testing.assert_close(gradient, PROBS * (torch.eye(5).double()[0] - PROBS[0]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_straight_through_gradient_of_two_positions_is_an_integral(temperature: float) -> None:
    """The difference of two Gumbel variates is logistic: E d softmax((e + g) / t)_0 / d e_0 is the integral of
    s (1 - s) / t with s = sigmoid((e_0 - e_1 + l) / t), over l logistic. Compared within 4.5 standard deviations,
    which are below 1% of it."""
    energies = torch.tensor([0.4, -0.3]).double().expand(N, 2).clone().requires_grad_()
    keep = torch.ones(1, 1, 2, dtype=torch.bool)
    weights = (
        StraightThroughAlignment(temperature)
        .train()(SoftmaxNormalizer()(energies[None], keep, Past.start(keep[0])))
        .weights
    )
    cost = torch.tensor([3.0, 1.0]).double()
    (gradients,) = torch.autograd.grad((weights * cost).sum(), [energies])
    grid, width = np.linspace(-60, 60, 400_001, retstep=True)
    curve = 1 / (1 + np.exp(-(0.7 + grid) / temperature))
    density = 1 / (2 + np.exp(grid) + np.exp(-grid))
    expected = (3.0 - 1.0) * (curve * (1 - curve) / temperature * density).sum() * width
    deviation = gradients[:, 0].std().item() / N**0.5
    assert deviation < 0.01 * expected
    assert abs(gradients[:, 0].mean().item() - expected) <= 4.5 * deviation
    torch.testing.assert_close(gradients[:, 1], -gradients[:, 0])


@pytest.mark.parametrize(
    "alignment", [SampledAlignment(0.5), StraightThroughAlignment(1.0)], ids=["sampled", "straight_through"]
)
def test_at_test_the_most_probable_position_is_taken(alignment: Alignment) -> None:
    found = alignment.eval()(softmax(ENERGIES, times=3))
    assert found.weights.argmax(-1).tolist() == [[2, 2, 2]]
    assert found.weights.sum().item() == 3
    assert found.log_prob is None
    assert found.entropy is None


@pytest.mark.parametrize(
    "alignment", [SampledAlignment(0.0), StraightThroughAlignment(1.0)], ids=["sampled", "through"]
)
def test_exact_logarithms_serve_as_well_as_those_of_the_weights(alignment: Alignment) -> None:
    torch.manual_seed(1)
    one = alignment.train()(softmax(ENERGIES, times=20))
    torch.manual_seed(1)
    other = alignment(softmax(ENERGIES, times=20, log_weights=True))
    for part, same in zip(one, other, strict=True):
        assert (part is None) == (same is None)
        if part is not None:
            torch.testing.assert_close(part, same)


@pytest.mark.parametrize(
    "alignment", [SampledAlignment(0.0), StraightThroughAlignment(1.0)], ids=["sampled", "through"]
)
def test_a_position_of_weight_zero_is_never_drawn(alignment: Alignment) -> None:
    sparse = torch.tensor([0.0, 0.25, 0.0, 0.75]).double().expand(1, 2000, -1).clone().requires_grad_()
    weights, *_ = alignment.train()(Normalized(sparse))
    assert not weights[..., [0, 2]].any()
    loss = (weights * torch.arange(4)).sum()
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, [sparse])
        assert gradient.isfinite().all()
