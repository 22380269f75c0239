"""Marginals of a binary linear chain: against all assignments, and by the forward-backward algorithm written again.

Shapes: N chains, S positions.
"""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.ops.linear_chain import linear_chain_log_odds

Array = NDArray[np.float64]
KEEP = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True, True, False, True, False, True, True]])


def drawn(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Unary (N, S) and pairwise (4,) potentials."""
    return torch.randn(KEEP.shape).double() * scale, torch.randn(4).double() * scale


def over_all_assignments(unary: Array, pairwise: Array) -> Array:
    """(S,), (2, 2) -> p(z_s = 1)."""
    assignments = np.array(list(itertools.product([0, 1], repeat=len(unary))))
    scores = assignments @ unary + pairwise[assignments[:, :-1], assignments[:, 1:]].sum(axis=1)
    odds = np.exp(scores - scores.max())
    marginals: Array = (odds / odds.sum()) @ assignments
    return marginals


def forward_backward(unary: Array, pairwise: Array) -> Array:
    """(S,), (2, 2) -> p(z_s = 1), in products of 2 x 2 matrices that are scaled at every step."""
    steps = np.exp(pairwise - pairwise.max())
    odds = np.exp(np.stack([np.zeros(len(unary)), unary], axis=1) - np.maximum(unary, 0)[:, None])
    forward, backward = odds.copy(), np.ones_like(odds)
    for s in range(1, len(unary)):
        forward[s] *= forward[s - 1] @ steps
        forward[s] /= forward[s].sum()
    for s in range(len(unary) - 2, -1, -1):
        backward[s] = steps @ (odds[s + 1] * backward[s + 1])
        backward[s] /= backward[s].sum()
    joint = forward * backward
    marginals: Array = joint[:, 1] / joint.sum(axis=1)
    return marginals


@pytest.mark.parametrize("length", range(1, 9))
def test_marginals_are_sums_over_all_assignments_of_what_is_kept(length: int) -> None:
    unary, pairwise = drawn()
    keep = KEEP[:, :length]
    found = torch.sigmoid(linear_chain_log_odds(unary[:, :length], keep, pairwise)).numpy()
    for n in range(len(keep)):
        kept = keep[n].numpy()
        if kept.any():
            expected = over_all_assignments(unary[n, :length].numpy()[kept], pairwise.view(2, 2).numpy())
            np.testing.assert_allclose(found[n, kept], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_long_chains_equal_the_forward_backward_algorithm(scale: float) -> None:
    unary, pairwise = torch.randn(4, 200).double() * scale, torch.randn(4).double() * scale
    keep = torch.rand(4, 200) < 0.8
    found = torch.sigmoid(linear_chain_log_odds(unary, keep, pairwise)).numpy()
    for n in range(4):
        kept = keep[n].numpy()
        expected = forward_backward(unary[n].numpy()[kept], pairwise.view(2, 2).numpy())
        np.testing.assert_allclose(found[n, kept], expected, rtol=0, atol=1e-10)


def test_gradients() -> None:
    unary, pairwise = (part.requires_grad_() for part in drawn())

    def log_odds(unary: Tensor, pairwise: Tensor) -> Tensor:
        return linear_chain_log_odds(unary, KEEP, pairwise).masked_fill(~KEEP, 0.0)

    assert torch.autograd.gradcheck(log_odds, (unary, pairwise))


def test_without_pairwise_potentials_positions_are_independent() -> None:
    unary, _ = drawn()
    torch.testing.assert_close(linear_chain_log_odds(unary, KEEP, torch.zeros(4).double())[KEEP], unary[KEEP])


def test_neighbours_that_agree_draw_each_other_along() -> None:
    unary = torch.tensor([[0.0, 3.0, 0.0, 0.0]]).double()
    agree = linear_chain_log_odds(unary, KEEP[:1, :4], torch.tensor([1.0, 0.0, 0.0, 1.0]).double())[0]
    assert agree[0] > agree[3] > 0
    differ = linear_chain_log_odds(unary, KEEP[:1, :4], torch.tensor([0.0, 1.0, 1.0, 0.0]).double())[0]
    assert differ[0] < 0 < differ[3]


@pytest.mark.parametrize("energy", [-1e4, 1e4])
def test_nothing_overflows(energy: float) -> None:
    unary = torch.full((1, 40), energy, requires_grad=True)
    pairwise = torch.tensor([50.0, -50.0, 0.0, 50.0], requires_grad=True)
    log_odds = linear_chain_log_odds(unary, torch.ones(1, 40, dtype=torch.bool), pairwise)
    assert (log_odds.sign() == np.sign(energy)).all()
    for gradient in torch.autograd.grad(log_odds.sum(), [unary, pairwise]):
        assert gradient.isfinite().all()
