"""Scores with extreme inputs; test_combinations compares their equations."""

import pytest
import torch

from nmt.attention.attention import Attention
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import CosineScore, GaussianMixtureScore
from nmt.attention.windows import GlobalWindow

VALID = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_any_query_gives_finite_weights_and_gradients(scale: float) -> None:
    """Tests float32 over 50 steps."""
    made = Attention(GaussianMixtureScore(4, 3), GlobalWindow(), SoftmaxNormalizer(), reads_past=True)
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
