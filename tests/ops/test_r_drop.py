"""The fused loss of R-Drop against torch's own operations, value and gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.ops import output_layer
from nmt.ops.cross_entropy import linear_cross_entropy
from nmt.ops.r_drop import linear_r_drop

N, R, V, PAD = 23, 7, 11, 2


def problem(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    tensors = [torch.randn(*shape, dtype=dtype) for shape in ((2, N, R), (V, R), (V,))]
    return [tensor.requires_grad_() for tensor in tensors], torch.randint(V, (N,))


def plain(tensors: list[Tensor], targets: Tensor, alpha: float, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Half of what the paper minimises, and its parts, written with torch's functions."""
    readouts, weight, bias = tensors
    real = targets != PAD
    first, second = F.linear(readouts, weight, bias).log_softmax(-1)[:, real]
    smoothed = sum(
        F.cross_entropy(one, targets[real], reduction="sum", label_smoothing=smoothing) for one in (first, second)
    )
    kl = sum(F.kl_div(q, p, log_target=True, reduction="sum") for p, q in ((first, second), (second, first)))
    return (smoothed + alpha * kl / 2) / 2, smoothed / 2, kl / 2


@pytest.mark.parametrize("alpha", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("chunk", "cached"), [(1, 1), (10 * V, 4 * V), (10**6, 10**6), (10**6, 6 * V)])
def test_equals_torchs_functions(
    alpha: float, smoothing: float, chunk: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_NUMBERS", chunk)
    monkeypatch.setattr(output_layer, "CACHED_NUMBERS", cached)
    tensors, targets = problem()
    targets[::5] = PAD
    found = linear_r_drop(*tensors, targets, alpha, smoothing, PAD)
    total, smoothed, divergence = plain(tensors, targets, alpha, smoothing)
    torch.testing.assert_close(found.total, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.smoothed, smoothed.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.nll, plain(tensors, targets, 0.0, 0.0)[1].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.divergence, divergence.detach(), rtol=1e-10, atol=1e-10)
    gradients, expected = (torch.autograd.grad(value * 3, tensors) for value in (found.total, total))
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_the_gradient_is_the_slope() -> None:
    """Central differences; the loss goes backward only once, so torch's gradcheck cannot take it."""
    tensors, targets = problem()
    step = 1e-6
    gradients = torch.autograd.grad(linear_r_drop(*tensors, targets, 5.0, 0.1, PAD).total, tensors)
    for index, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        ends = []
        for sign in (1, -1):
            moved = [t.detach() + sign * step * direction if i == index else t.detach() for i, t in enumerate(tensors)]
            ends.append(linear_r_drop(*moved, targets, 5.0, 0.1, PAD).total)
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), (gradient * direction).sum(), rtol=1e-6, atol=1e-6)


def test_two_equal_predictions_cost_what_one_costs() -> None:
    (readouts, weight, bias), targets = problem()
    same = readouts[:1].expand(2, -1, -1)
    found = linear_r_drop(same, weight, bias, targets, 5.0, 0.1, PAD)
    alone = linear_cross_entropy(readouts[0], weight, bias, targets, 0.1, PAD)
    assert found.divergence.abs() < 1e-12
    torch.testing.assert_close(found.total, alone.smoothed)
    torch.testing.assert_close(found.nll, alone.nll)
    both = (torch.autograd.grad(each, [readouts, weight, bias]) for each in (found.total, alone.smoothed))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want)


def test_predictions_far_apart_have_a_finite_divergence() -> None:
    """Probabilities underflow, their ratios do not."""
    readouts = torch.tensor([[[1.0]], [[-1.0]]]).requires_grad_()
    weight = torch.tensor([[300.0], [-300.0]])
    found = linear_r_drop(readouts, weight, torch.zeros(2), torch.tensor([1]), 2.0)
    assert float(found.divergence) == 600
    assert float(found.nll) == 300
    (gradient,) = torch.autograd.grad(found.total, readouts)
    assert gradient.isfinite().all()


def test_only_what_is_minimised_goes_backward_and_in_evaluation_nothing() -> None:
    tensors, targets = problem()
    found = linear_r_drop(*tensors, targets, 5.0)
    assert [value.requires_grad for value in found] == [True, False, False, False]
    with torch.no_grad():
        assert not linear_r_drop(*tensors, targets, 5.0).total.requires_grad


def test_under_autocast_gradients_stay_near_those_in_float32() -> None:
    tensors, targets = problem(torch.float32)
    exact = torch.autograd.grad(linear_r_drop(*tensors, targets, 5.0, 0.1).total, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        total = linear_r_drop(*tensors, targets, 5.0, 0.1).total
    assert total.dtype == torch.float32
    for got, want in zip(torch.autograd.grad(total, tensors), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()
