"""The chunked loss of the output layer: value and gradient equal those of torch's operations on all logits."""

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.ops.output_loss import SIZES, ChunkSizes, Criterion, OutputLoss, output_loss
from nmt.training.losses import distillation, likelihood, r_drop

N, R, V, PAD = 23, 7, 11, 2
CHUNKS = [(1, 1), (10 * V, 4 * V), (10**6, 6 * V), (10**6, 10**6)]  # most logits at a time, most logits per criterion
OF_ONE_OR_TWO = pytest.mark.parametrize(
    ("criterion", "copies"),
    [(partial(likelihood, smoothing=0.1), 1), (partial(r_drop, alpha=5.0, smoothing=0.1), 2)],
)
Tensors = list[Tensor]


def tensors(copies: int = 1, width: int = R, dtype: torch.dtype = torch.float64) -> Tensors:
    """Draw readouts (C, N, R), the output layer's table (V, R) and its bias (V,)."""
    shapes = ((copies, N, width), (V, width), (V,))
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def targets() -> Tensor:
    drawn = torch.randint(V, (N,))
    drawn[::5] = PAD
    return drawn


def cross_entropy_of(logits: Tensor, right: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, right, reduction="sum", label_smoothing=smoothing)


def plain_likelihood(operands: Tensors, right: Tensor, smoothing: float = 0.1) -> Tensor:
    return cross_entropy_of(F.linear(*operands)[0, right != PAD], right[right != PAD], smoothing)


def plain_r_drop(operands: Tensors, right: Tensor, smoothing: float = 0.1, alpha: float = 5.0) -> Tensor:
    """Compute half of R-Drop's loss (Liang et al. 2021)."""
    real = right != PAD
    first, second = F.linear(*operands)[:, real]
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    divergence = F.kl_div(q, p, log_target=True, reduction="sum") + F.kl_div(p, q, log_target=True, reduction="sum")
    sides = cross_entropy_of(first, right[real], smoothing) + cross_entropy_of(second, right[real], smoothing)
    return (sides + alpha * divergence / 2) / 2


def plain_distillation(
    operands: Tensors, right: Tensor, teachers: list[Tensors], weight: float = 0.3, smoothing: float = 0.1
) -> Tensor:
    real = right != PAD
    logits = F.linear(*operands)[0, real]
    q = torch.stack([F.linear(*teacher)[0, real].softmax(-1) for teacher in teachers]).mean(0).detach()
    divergence = F.kl_div(logits.log_softmax(-1), q, reduction="sum")
    return (1 - weight) * cross_entropy_of(logits, right[real], smoothing) + weight * divergence


def distil(
    operands: Tensors,
    right: Tensor,
    teachers: list[Tensors],
    weight: float = 0.3,
    smoothing: float = 0.1,
    sizes: ChunkSizes = SIZES,
) -> OutputLoss:
    layers = [(table, bias) for _, table, bias in teachers]
    criterion = partial(distillation, output_layers=layers, teacher_weight=weight, smoothing=smoothing)
    nothing = torch.zeros(len(right), 0, dtype=torch.int64)  # no token is copied
    inputs = ((readouts[0][:, None], torch.ones(len(right), 1), nothing) for readouts, *_ in teachers)
    components = (part for each in inputs for part in each)
    return output_loss(*operands, right != PAD, criterion, right, *components, sizes=sizes)


def assert_same(loss: OutputLoss, expected: Tensor, operands: Tensors) -> None:
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=1e-12)
    gradients, wanted = (torch.autograd.grad(value * 3, operands) for value in (loss.total, expected))
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize(("chunk", "part"), CHUNKS)
def test_equals_torchs_functions(chunk: int, part: int, smoothing: float) -> None:
    sizes = ChunkSizes(chunk, part)
    right, one, two = targets(), tensors(), tensors(copies=2)
    loss = output_loss(*one, right != PAD, partial(likelihood, smoothing=smoothing), right, sizes=sizes)
    assert_same(loss, plain_likelihood(one, right, smoothing), one)
    torch.testing.assert_close(loss.terms["loss"].sum(), plain_likelihood(one, right, 0.0).detach())
    torch.testing.assert_close(loss.terms["smoothed_loss"].sum(), loss.total.detach())
    for alpha in (0.0, 5.0):
        loss = output_loss(*two, right != PAD, partial(r_drop, alpha=alpha, smoothing=smoothing), right, sizes=sizes)
        assert_same(loss, plain_r_drop(two, right, smoothing, alpha), two)
        torch.testing.assert_close(loss.terms["loss"].sum(), plain_r_drop(two, right, 0.0, 0.0).detach())
        divergence = (plain_r_drop(two, right, 0.0, 2.0) - plain_r_drop(two, right, 0.0, 0.0)).detach()
        torch.testing.assert_close(loss.terms["r_drop_loss"].sum(), divergence)
    for weight, teachers in ((0.3, [tensors()]), (1.0, [tensors(width=3), tensors(width=9)])):
        loss = distil(one, right, teachers, weight, smoothing, sizes)
        assert_same(loss, plain_distillation(one, right, teachers, weight, smoothing), one)
        divergence = plain_distillation(one, right, teachers, 1.0).detach()
        torch.testing.assert_close(loss.terms["distillation_loss"].sum(), divergence)


@pytest.mark.parametrize(("chunk", "part"), CHUNKS)
def test_terms_are_by_position_and_zero_on_padding(chunk: int, part: int) -> None:
    sizes = ChunkSizes(chunk, part)
    operands, right = tensors(), targets()
    terms = output_loss(*operands, right != PAD, partial(likelihood, smoothing=0.1), right, sizes=sizes).terms
    expected = F.cross_entropy(F.linear(*operands)[0], right, reduction="none", ignore_index=PAD)
    torch.testing.assert_close(terms["loss"], expected.detach(), rtol=1e-12, atol=1e-12)
    assert not terms["smoothed_loss"][right == PAD].any()
    assert not any(term.requires_grad for term in terms.values())


@OF_ONE_OR_TWO
def test_goes_backward_once_and_not_at_all_in_evaluation(criterion: Criterion, copies: int) -> None:
    operands, right = tensors(copies), targets()
    with torch.no_grad():
        assert not output_loss(*operands, right != PAD, criterion, right).total.requires_grad
    loss = output_loss(*operands, right != PAD, criterion, right).total
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


@OF_ONE_OR_TWO
def test_frees_the_numbers_of_a_part_before_the_next(criterion: Criterion, copies: int) -> None:
    earlier: list[weakref.ref[Tensor]] = []

    def watched(logits: Tensor, right: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert not any(tensor() is not None for tensor in earlier)
        loss, terms = criterion(logits, right)
        earlier.extend(weakref.ref(tensor) for tensor in (logits, loss, *terms.values()))
        return loss, terms

    right = targets()
    output_loss(*tensors(copies), right != PAD, watched, right, sizes=ChunkSizes(10 * V * copies, 4 * V * copies))
    assert len(earlier) > 3 * 3


def test_a_hopeless_target_has_a_finite_loss() -> None:
    """The target's probability underflows, its logarithm does not."""
    weight, one = torch.tensor([[500.0], [-500.0]]), torch.ones(1, dtype=torch.bool)
    criterion = partial(likelihood, smoothing=0.0)
    loss = output_loss(torch.ones(1, 1, 1), weight, torch.zeros(2), one, criterion, torch.tensor([1]))
    assert float(loss.total) == 1000


@OF_ONE_OR_TWO
def test_under_autocast_gradients_stay_near_those_in_float32(criterion: Criterion, copies: int) -> None:
    operands, right = tensors(copies, dtype=torch.float32), targets()
    exact = torch.autograd.grad(output_loss(*operands, right != PAD, criterion, right).total, operands)
    with torch.autocast("cpu", torch.bfloat16):
        loss = output_loss(*operands, right != PAD, criterion, right)
    assert loss.total.dtype == loss.terms["loss"].dtype == torch.float32
    for got, want in zip(torch.autograd.grad(loss.total, operands), exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.02 * want.norm()
