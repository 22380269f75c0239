"""Gaussians over source positions: they move forward alone, from the query alone.

Shapes: B batch, S source positions, T target positions, K Gaussians.
"""

import pytest
import torch
from combinations import Case, attend

from nmt.attention.attention import Attention, GlobalWindow
from nmt.attention.memory import Past
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import GaussianMixtureScore

VALID = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])


def attention(components: int = 3) -> Attention:
    return Attention(GaussianMixtureScore(4, components), GlobalWindow(), SoftmaxNormalizer())


def test_means_move_forward_whatever_the_query() -> None:
    made, query, states, valid = Case("gaussian_mixture-global-softmax", steps=6).make()
    past, memory, before = made.start(valid), made.remember(states, valid), torch.zeros(3, 2).double()
    for one in query.unbind(1):
        past = made.step(one[:, None], memory, past).past
        assert past.means is not None
        assert (past.means > before).all()
        before = past.means


def test_the_weights_do_not_depend_on_the_states() -> None:
    made, query, states, valid = Case("gaussian_mixture-global-softmax").make()
    other = attend(made, query, states * 2 - 1, valid)
    assert torch.equal(attend(made, query, states, valid).weights, other.weights)
    assert not torch.equal(attend(made, query, states, valid).context, other.context)


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


def test_each_hypothesis_has_means_of_its_own() -> None:
    past = Past.start(VALID)._replace(means=torch.rand(2, 3))
    rows = torch.tensor([1, 1, 0])
    assert past.means is not None
    assert torch.equal(past.select(rows).means, past.means[rows])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_any_query_gives_finite_weights_and_gradients(scale: float) -> None:
    """In float32, and over many steps."""
    made = attention()
    query, states = (torch.randn(2, 50, 4) * scale).requires_grad_(), torch.randn(2, 9, 5)
    attended = made.sequence(query, made.remember(states, VALID), made.start(VALID))
    torch.testing.assert_close(attended.weights.sum(-1), torch.ones(2, 50))
    gradients = torch.autograd.grad(attended.context.square().sum(), [query, *made.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_positions_beyond_256_are_told_apart_in_reduced_precision() -> None:
    """bfloat16 has no odd numbers there."""
    made, valid = attention(1), torch.ones(1, 400, dtype=torch.bool)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.autocast("cpu", torch.bfloat16):
        memory = made.remember(torch.randn(1, 400, 5), valid)
        weights = made.sequence(torch.randn(1, 400, 4), memory, made.start(valid)).weights
    assert weights[0].argmax(-1).tolist() == list(range(400))
