"""The fused output layer and loss against torch's own, value and gradient."""

import pytest
import torch
from torch.nn import functional as F

from nmt.ops import output_layer as module
from nmt.ops.cross_entropy import linear_cross_entropy

N, R, V = 23, 7, 11


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    readouts, weight, bias = torch.randn(N, R, dtype=dtype), torch.randn(V, R, dtype=dtype), torch.randn(V, dtype=dtype)
    return *(tensor.requires_grad_() for tensor in (readouts, weight, bias)), torch.randint(V, (N,))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("chunk", [1, 5 * V, 10**6])
@pytest.mark.parametrize("cached", [1, 2 * V, 10**6])
def test_equals_torchs_cross_entropy(
    smoothing: float, chunk: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMBERS", chunk)
    monkeypatch.setattr(module, "CACHED_NUMBERS", cached)
    readouts, weight, bias, targets = problem()
    fused = linear_cross_entropy(readouts, weight, bias, targets, smoothing)
    gradients = torch.autograd.grad(fused.smoothed * 3, [readouts, weight, bias])
    logits = F.linear(readouts, weight, bias)
    plain = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    expected = torch.autograd.grad(plain * 3, [readouts, weight, bias])
    torch.testing.assert_close(fused.smoothed, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused.nll, F.cross_entropy(logits, targets, reduction="sum"), rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_padding_costs_nothing() -> None:
    readouts, weight, bias, targets = problem()
    targets[::3] = 2
    padded = linear_cross_entropy(readouts, weight, bias, targets, 0.1, pad=2)
    real = targets != 2
    alone = linear_cross_entropy(readouts[real], weight, bias, targets[real], 0.1)
    torch.testing.assert_close(padded.smoothed, alone.smoothed)
    torch.testing.assert_close(padded.nll, alone.nll)
    torch.testing.assert_close(padded.log_probs[real], alone.log_probs)
    assert not padded.log_probs[~real].any()
    for found, expected in zip(
        *(torch.autograd.grad(loss.smoothed, [readouts, weight, bias]) for loss in (padded, alone)), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_goes_backward_once() -> None:
    readouts, weight, bias, targets = problem()
    loss = linear_cross_entropy(readouts, weight, bias, targets).smoothed
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_a_hopeless_target_has_a_finite_loss() -> None:
    """Its probability underflows, its logarithm does not."""
    weight, bias = torch.tensor([[500.0], [-500.0]]), torch.zeros(2)
    loss = linear_cross_entropy(torch.ones(1, 1), weight, bias, torch.tensor([1]))
    assert float(loss.nll) == 1000


def test_weights_tied_to_embeddings_collect_both_gradients() -> None:
    table = torch.randn(V, R, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(V, (N,))
    fused = linear_cross_entropy(table[targets], table, torch.zeros(V, dtype=torch.float64), targets)
    plain = F.cross_entropy(table[targets] @ table.t(), targets, reduction="sum")
    torch.testing.assert_close(*(torch.autograd.grad(value, table)[0] for value in (fused.smoothed, plain)))


def test_makes_no_gradient_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    readouts, weight, bias, targets = problem(torch.float32)
    monkeypatch.setattr(module, "_add", lambda *_: pytest.fail("made a gradient"))
    with torch.no_grad():
        assert not linear_cross_entropy(readouts, weight, bias, targets).smoothed.requires_grad


def test_under_autocast_gradients_stay_near_those_in_float32() -> None:
    readouts, weight, bias, targets = problem(torch.float32)
    exact = torch.autograd.grad(linear_cross_entropy(readouts, weight, bias, targets, 0.1).smoothed, [readouts, weight])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(readouts, weight, bias, targets, 0.1)
    rough = torch.autograd.grad(loss.smoothed, [readouts, weight])
    assert loss.smoothed.dtype == torch.float32
    for got, want in zip(rough, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()
