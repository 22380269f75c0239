"""The fused loss of distillation against torch's own operations, value and gradient."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.ops import output_layer
from nmt.ops.cross_entropy import linear_cross_entropy
from nmt.ops.distillation import Operands, linear_distillation

N, R, V, PAD = 23, 7, 11, 2


def operands(width: int = R, dtype: torch.dtype = torch.float64) -> Operands:
    readouts, weight, bias = (
        torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((N, width), (V, width), (V,))
    )
    return readouts, weight, bias


def targets() -> Tensor:
    found = torch.randint(V, (N,))
    found[::5] = PAD
    return found


def plain(
    student: Operands, right: Tensor, teachers: list[Operands], share: float, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What is minimised, and its parts, written with torch's functions."""
    real = right != PAD
    logits = F.linear(*student)[real]
    taught = torch.stack([F.linear(*teacher)[real].softmax(-1) for teacher in teachers]).mean(0).detach()
    smoothed = F.cross_entropy(logits, right[real], reduction="sum", label_smoothing=smoothing)
    divergence = F.kl_div(logits.log_softmax(-1), taught, reduction="sum")
    return (1 - share) * smoothed + share * divergence, smoothed, divergence


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("widths", [(R,), (3, 9)])
@pytest.mark.parametrize(("chunk", "cached"), [(1, 1), (10 * V, 4 * V), (10**6, 10**6)])
def test_equals_torchs_functions(
    share: float, smoothing: float, widths: tuple[int, ...], chunk: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_NUMBERS", chunk)
    monkeypatch.setattr(output_layer, "CACHED_NUMBERS", cached)
    student, right, teachers = operands(), targets(), [operands(width) for width in widths]
    found = linear_distillation(*student, right, teachers, share, smoothing, PAD)
    total, smoothed, divergence = plain(student, right, teachers, share, smoothing)
    torch.testing.assert_close(found.total, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.smoothed, smoothed.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.nll, plain(student, right, teachers, 0.0, 0.0)[1].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.divergence, divergence.detach(), rtol=1e-12, atol=1e-12)
    gradients, expected = (torch.autograd.grad(value * 3, student) for value in (found.total, total))
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_teacher_that_predicts_the_same_has_nothing_to_teach() -> None:
    student, right = operands(), targets()
    found = linear_distillation(*student, right, [student, student], 1.0, 0.1, PAD)
    assert found.total.abs() < 1e-12
    assert all(gradient.abs().max() < 1e-12 for gradient in torch.autograd.grad(found.total, student))
    alone = linear_cross_entropy(*student, right, 0.1, PAD)
    torch.testing.assert_close(found.smoothed, alone.smoothed.detach())
    torch.testing.assert_close(found.nll, alone.nll)


def test_a_teacher_that_is_certain_is_a_reference() -> None:
    """Its distribution has zeros, whose logarithms would not be numbers."""
    student, right = operands(), torch.randint(V, (N,))
    certain = torch.eye(N, dtype=torch.float64), 1e4 * F.one_hot(right, V).double().t(), torch.zeros(V).double()
    found = linear_distillation(*student, right, [certain], 1.0)
    alone = linear_cross_entropy(*student, right)
    torch.testing.assert_close(found.total, alone.nll)
    for got, want in zip(*(torch.autograd.grad(each, student) for each in (found[0], alone[0])), strict=True):
        torch.testing.assert_close(got, want)


def test_only_the_student_learns_and_in_evaluation_nobody() -> None:
    student, teacher, right = operands(), operands(), targets()
    found = linear_distillation(*student, right, [teacher], 0.5)
    assert [value.requires_grad for value in found] == [True, False, False, False]
    assert torch.autograd.grad(found.total, teacher, allow_unused=True) == (None, None, None)
    with torch.no_grad():
        assert not linear_distillation(*student, right, [teacher], 0.5).total.requires_grad


def test_under_autocast_gradients_stay_near_those_in_float32() -> None:
    student, teacher, right = operands(dtype=torch.float32), operands(dtype=torch.float32), targets()
    exact = torch.autograd.grad(linear_distillation(*student, right, [teacher], 0.5, 0.1).total, student)
    with torch.autocast("cpu", torch.bfloat16):
        total = linear_distillation(*student, right, [teacher], 0.5, 0.1).total
    assert total.dtype == torch.float32
    for got, want in zip(torch.autograd.grad(total, student), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()
