"""Dropout by the bits of large random numbers."""

import pytest
import torch

from nmt.ops.dropout import Dropout, dropout


@pytest.mark.parametrize("p", [0.1, 0.35, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_the_share_asked_for_and_divides_by_the_rest(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    n = 400_003  # no multiple of four
    dropped = dropout(torch.ones(n, dtype=dtype), p, training=True)
    assert dropped.dtype == dtype
    zeros = int((dropped == 0).sum())
    assert abs(zeros - p * n) < 5 * (n * p * (1 - p)) ** 0.5
    torch.testing.assert_close(dropped[dropped != 0].unique(), torch.tensor([1 / (1 - p)]).to(dtype))


def test_neighbours_are_independent() -> None:
    """Also those that come from the same random number."""
    torch.manual_seed(1)
    zero = (dropout(torch.ones(100_000, 4), 0.5, training=True) == 0).double()
    correlation = torch.corrcoef(zero.T) - torch.eye(4)
    assert correlation.abs().max() < 0.02


def test_gradients_pass_where_values_do() -> None:
    inputs = torch.randn(10, 7, requires_grad=True)
    outputs = dropout(inputs, 0.4, training=True)
    (gradient,) = torch.autograd.grad(outputs.sum(), [inputs])
    torch.testing.assert_close(gradient, torch.where(outputs == 0, 0.0, 1 / 0.6))


def test_torchs_seed_decides() -> None:
    module, inputs = Dropout(0.5), torch.ones(3, 5)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(module(inputs))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_does_nothing_in_evaluation_or_at_zero_and_everything_at_one() -> None:
    inputs = torch.ones(3, 5)
    assert Dropout(0.5).eval()(inputs) is inputs
    assert Dropout(0.0)(inputs) is inputs
    assert not Dropout(1.0)(inputs).any()
