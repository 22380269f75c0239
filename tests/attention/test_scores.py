"""Scores beyond their equations, which test_combinations compares: extreme inputs, and Gaussians that move.

Shapes: B batch, S source positions, T target positions, K Gaussians.
"""

import pytest
import torch

from nmt.attention.attention import Attention, GlobalWindow
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import (
    CosineScore,
    GaussianMixtureScore,
)

VALID = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])


def attention(components: int = 3) -> Attention:
    return Attention(GaussianMixtureScore(4, components), GlobalWindow(), SoftmaxNormalizer(), reads_past=True)


def test_with_zero_parameters_the_attention_is_the_diagonal() -> None:
    """alpha = beta = 1, and the means move from position to position; past the end they stay at the last one."""
    made = attention()
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    past = made.start(VALID)
    weights = made.sequence(torch.randn(2, 9, 4), made.remember(torch.randn(2, 9, 5), VALID), past).weights
    assert weights[0].argmax(-1).tolist() == list(range(9))
    assert weights[1].argmax(-1).tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    offsets = torch.arange(9.0) - 4
    torch.testing.assert_close(weights[0, 4], (-offsets.square()).softmax(-1))


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_any_query_gives_finite_weights_and_gradients(scale: float) -> None:
    """In float32, and over many steps."""
    made = attention()
    query, states = (torch.randn(2, 50, 4) * scale).requires_grad_(), torch.randn(2, 9, 5)
    attended = made.sequence(query, made.remember(states, VALID), made.start(VALID))
    torch.testing.assert_close(attended.weights.sum(-1), torch.ones(2, 50))
    gradients = torch.autograd.grad(attended.context.square().sum(), [query, *made.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_cosine_of_a_zero_state_is_zero_with_finite_gradients() -> None:
    score = CosineScore(4, 4, 1.0).double()
    memory = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    energies = score(torch.randn(2, 5, 4).double(), score.keys(memory))
    assert not energies.any()
    (gradient,) = torch.autograd.grad(energies.sum(), [memory])
    assert gradient.isfinite().all()
