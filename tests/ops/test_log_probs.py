"""Log-probabilities of tokens against torch's own, value and gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.ops import output_layer
from nmt.ops.log_probs import linear_log_probs

N, R, V = 23, 7, 11


def problem(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    tensors = [torch.randn(*shape, dtype=dtype) for shape in ((N, R), (V, R), (V,))]
    return [tensor.requires_grad_() for tensor in tensors], torch.randint(V, (N,))


@pytest.mark.parametrize(("chunk", "cached"), [(1, 1), (5 * V, 2 * V), (10**6, 10**6)])
def test_equals_torchs_log_softmax(chunk: int, cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_NUMBERS", chunk)
    monkeypatch.setattr(output_layer, "CACHED_NUMBERS", cached)
    tensors, tokens = problem()
    found = linear_log_probs(*tensors, tokens)
    expected = F.linear(*tensors).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(N, dtype=torch.float64)
    gradients = (torch.autograd.grad(value, tensors, weights) for value in (found, expected))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_the_gradient_is_the_slope() -> None:
    tensors, tokens = problem()
    assert torch.autograd.gradcheck(lambda *given: linear_log_probs(*given, tokens), tensors)


def test_under_autocast_gradients_stay_near_those_in_float32() -> None:
    tensors, tokens = problem(torch.float32)
    weights = torch.randn(N)
    exact = torch.autograd.grad(linear_log_probs(*tensors, tokens), tensors, weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_log_probs(*tensors, tokens)
    assert found.dtype == torch.float32
    for got, want in zip(torch.autograd.grad(found, tensors, weights), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()
