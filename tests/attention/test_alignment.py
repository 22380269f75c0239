"""Alignments that draw a position in training: the distribution of the draws, and the gradients.

REINFORCE is tested on a problem so small that all draws can be enumerated: S = 3 positions, T = 2 steps, one sentence.
Frequencies and means over N draws may differ from their expectation by 4.5 standard deviations.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from nmt.attention.alignment import Aligned, Alignment, Choice, Policy, SampledAlignment, StraightThroughAlignment
from nmt.attention.normalizers import Normalized, SoftmaxNormalizer
from nmt.attention.scores import Past

N = 40_000
ENERGIES = torch.tensor([0.3, -1.0, 1.2, 5.0, 0.0]).double()
KEEP = torch.tensor([True, True, True, False, True])
PROBS = torch.tensor([0.3, -1.0, 1.2, -torch.inf, 0.0]).double().softmax(0)


def softmax(energies: Tensor, keep: Tensor = KEEP, times: int = N, log_weights: bool = False) -> Normalized:
    """Normalise energies (S,) and repeat the distribution `times` times: (1, times, S)."""
    normalizer = SoftmaxNormalizer()
    normalizer.with_log_weights = log_weights
    distribution: Normalized = normalizer(
        energies.expand(1, times, -1), keep.expand(1, 1, -1), Past.initial(keep[None])
    )
    return distribution


def draw(alignment: Alignment, energies: Tensor = ENERGIES, times: int = N) -> Aligned:
    """Return the weights of `times` draws: (S,) -> (1, times, S)."""
    aligned: Aligned = alignment.train()(softmax(energies, times=times))
    return aligned


@pytest.mark.parametrize(
    "alignment",
    [SampledAlignment(0.0), StraightThroughAlignment(0.5), StraightThroughAlignment(2.0)],
    ids=["sampled", "gumbel-sharp", "gumbel-flat"],
)
def test_a_position_is_drawn_with_its_probability(alignment: Alignment) -> None:
    """The temperature of a straight-through alignment changes only its gradient, not the draws."""
    weights = draw(alignment).weights[0]
    assert torch.equal(weights, torch.eye(5).double()[weights.argmax(-1)])  # exactly one-hot
    deviation = (PROBS * (1 - PROBS) / N).sqrt()
    assert ((weights.mean(0) - PROBS).abs() <= 4.5 * deviation).all()


def test_log_prob_is_that_of_the_position_drawn_and_entropy_that_of_the_distribution() -> None:
    weights, log_prob, entropy = draw(SampledAlignment(0.0), times=50)
    assert log_prob is not None
    assert entropy is not None
    torch.testing.assert_close(log_prob[0], PROBS[weights[0].argmax(-1)].log())
    probs = PROBS[KEEP]
    torch.testing.assert_close(entropy, -(probs * probs.log()).sum().expand(1, 50))


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
    """The difference l of two Gumbel variates is logistic. So E d softmax((e + g) / t)_0 / d e_0 is the mean over l of
    s (1 - s) / t, with s = sigmoid((e_0 - e_1 + l) / t). 4.5 standard deviations are below 1% of this mean."""
    energies = torch.tensor([0.4, -0.3]).double().expand(N, 2).clone().requires_grad_()
    keep = torch.ones(1, 1, 2, dtype=torch.bool)
    distribution = SoftmaxNormalizer()(energies[None], keep, Past.initial(keep[0]))
    weights = StraightThroughAlignment(temperature).train()(distribution).weights
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


S, T, Q, N = 3, 2, 4, 40_000
SEQUENCES = torch.tensor(list(itertools.product(range(S), repeat=T)))
BASELINES = ["moving", "learned"]


class Problem(NamedTuple):
    first: Tensor  # (S,) energies of step 1
    second: Tensor  # (S, S) energies of step 2, by row for each position drawn at step 1
    reward1: Tensor  # (S,) log p(y_1 | position of step 1)
    reward2: Tensor  # (S, S) log p(y_2 | positions of steps 1 and 2)


@pytest.fixture
def problem() -> Problem:
    first, second = torch.randn(S).double(), torch.randn(S, S).double()
    return Problem(first, second, -3 - torch.rand(S).double(), -4 - 2 * torch.rand(S, S).double())


def policy_of(baseline: str, discount: float = 1.0, entropy_weight: float = 0.0) -> Policy:
    policy = Policy(Q, baseline, vocabulary=20, discount=discount, entropy_weight=entropy_weight)
    return policy.double() if baseline == "learned" else policy


def settled(policy: Policy) -> Policy:
    """Set the baseline near the mean reward; in evaluation mode it stays there."""
    with torch.no_grad():
        if policy.learned is None:
            policy.mean_reward.fill_(-4.2)
        else:
            policy.learned.weight.copy_(torch.tensor([[-8.5, -5.0, 0.3, -0.3]]))
            policy.learned.bias.zero_()
    return policy.eval()


def queries(drawn: Tensor) -> Tensor:
    """Encode in the query the step, and at step 2 the position drawn at step 1: int64 (B, 2) -> (B, T, Q)."""
    query = torch.eye(T, Q).double().expand(len(drawn), T, Q).clone()
    query[:, 1, 2] = drawn[:, 0].double()
    return query


def exact_gradients(problem: Problem, discount: float = 1.0) -> list[Tensor]:
    """Compute by enumeration the gradients of -E[r_1 + r_2], the rewards, with respect to all energies. discount:
    factor of r_2 in the gradient for the first draw."""
    first, second = problem.first.clone().requires_grad_(), problem.second.clone().requires_grad_()
    p1, p2 = first.softmax(0), second.softmax(1)
    later = (p2 * problem.reward2).sum(1)
    of_first = -(p1 * (problem.reward1 + discount * later.detach())).sum()
    of_second = -(p1.detach() * later).sum()
    return list(torch.autograd.grad(of_first + of_second, [first, second]))


def rewards_of(problem: Problem, drawn: Tensor) -> Tensor:
    """Look up the rewards of drawn positions: int64 (B, 2) -> (B, 2)."""
    return torch.stack([problem.reward1[drawn[:, 0]], problem.reward2[drawn[:, 0], drawn[:, 1]]], dim=1)


def counted(problem: Problem, policy: Policy) -> list[Tensor]:
    """Compute the policy's mean gradient over all sequences of positions, weighted by their probabilities."""
    first, second = problem.first.clone().requires_grad_(), problem.second.clone().requires_grad_()
    log_p1, log_p2 = first.log_softmax(0), second.log_softmax(1)
    loss = torch.zeros(()).double()
    for drawn in SEQUENCES:
        log_prob = torch.stack([log_p1[drawn[0]], log_p2[drawn[0], drawn[1]]])[None]
        choice = Choice(log_prob, torch.zeros(1, T).double(), queries(drawn[None]))
        part = policy(choice, rewards_of(problem, drawn[None]), torch.ones(1, T, dtype=torch.bool)).loss
        loss = loss + log_prob.detach().sum().exp() * part
    return list(torch.autograd.grad(loss, [first, second]))


@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "settled"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_the_mean_gradient_is_the_exact_one_whatever_the_baseline(
    problem: Problem, baseline: str, fresh: bool, discount: float
) -> None:
    """The mean is enumerated, so only the rounding of float32 rewards remains."""
    policy = policy_of(baseline, discount)
    found = counted(problem, policy.eval() if fresh else settled(policy))
    for mean, exact in zip(found, exact_gradients(problem, discount), strict=True):
        torch.testing.assert_close(mean, exact, rtol=0, atol=2e-6)


def simple_choice(log_prob: Tensor, entropy: float = 0.7) -> Choice:
    query = torch.randn(*log_prob.shape, Q, dtype=torch.float64, requires_grad=True)
    return Choice(log_prob, torch.full_like(log_prob, entropy), query)


REAL = torch.tensor([[True, True, True], [True, False, False]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -100.0, -100.0]]).double()


def test_the_moving_mean_follows_the_updates() -> None:
    policy = policy_of("moving").train()
    policy(simple_choice(torch.zeros(2, 3).double()), LOG_PROBS, REAL)
    expected = -math.log(20)
    assert policy.mean_reward.item() == pytest.approx(expected)  # only an update, with the mean of its batch, moves it
    for _ in range(2):
        policy.after_update(torch.tensor(-4.0))
        expected = 0.9 * expected + 0.1 * -4
        assert policy.mean_reward.item() == pytest.approx(expected)
    assert "mean_reward" in policy.state_dict()


def test_the_learned_baseline_learns_the_returns_and_the_query_does_not_know() -> None:
    policy = policy_of("learned")
    log_prob = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    choice = simple_choice(log_prob)
    found = policy(choice, LOG_PROBS, REAL)
    assert policy.learned is not None
    assert torch.autograd.grad(found.loss, policy.learned.weight, retain_graph=True, allow_unused=True) == (None,)
    gradients = torch.autograd.grad(
        found.loss + found.regression, [policy.learned.weight, choice.query, log_prob], allow_unused=True
    )
    returns, query = torch.tensor([-7.0, -6.0, -4.0, -8.0]).double(), choice.query[REAL]
    errors = returns - (query @ policy.learned.weight[0] + policy.learned.bias)
    torch.testing.assert_close(gradients[0][0], -2 * errors @ query, rtol=1e-5, atol=1e-5)
    assert gradients[1] is None
    torch.testing.assert_close(gradients[2][REAL], -errors, rtol=1e-5, atol=1e-5)
