"""The chunked loss of the output layer, of mixtures and of copies: value and gradient equal those of plain operations
on all logits, in float64."""

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.ops import output_loss as module
from nmt.ops.output_loss import (
    SIZES,
    ChunkSizes,
    Criterion,
    OutputLoss,
    SeveralReadouts,
    mean_over_mixture,
    mixture_log_probs,
    of_mixture,
    output_loss,
    target_log_probs,
    with_copies,
)
from nmt.training.losses import distillation, likelihood, r_drop

N, R, V, PAD = 23, 7, 11, 2
EXACT = {"rtol": 1e-10, "atol": 1e-10}
LIKELIHOOD, R_DROP = partial(likelihood, smoothing=0.1), partial(r_drop, alpha=5.0, smoothing=0.1)
CHUNKS = [(1, 1), (10 * V, 4 * V), (10**6, 6 * V), (10**6, 10**6)]  # most logits at a time, most logits per criterion
OF_ONE_OR_TWO = pytest.mark.parametrize(
    ("criterion", "copies"),
    [(LIKELIHOOD, 1), (R_DROP, 2)],
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
    terms = output_loss(*operands, right != PAD, LIKELIHOOD, right, sizes=sizes).terms
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


# Mixtures of K readouts at M positions, one of them padding; copies of S source tokens at T positions of B sentences.
K, M, B, T, S = 4, 7, 3, 4, 5
COUNTED = torch.arange(M) != 5


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def shares_of(*sizes: int) -> Tensor:
    """Draw mixture weights, some of which are 0."""
    shares = drawn(*sizes).softmax(-1) * (torch.rand(sizes) > 0.3)
    shares[..., 0] += 0.1
    return shares / shares.sum(-1, keepdim=True)


def mixture(copies: int = 1) -> tuple[Tensors, Tensor]:
    """Draw readouts of C passes, an output layer and mixture weights; and the targets."""
    operands = [drawn(copies, M, K, R), drawn(V, R), drawn(V), shares_of(copies, M, K)]
    operands[3][:, ~COUNTED] = 0.0
    return operands, torch.randint(V, (M,))


def leaves(operands: Tensors) -> Tensors:
    return [operand.clone().requires_grad_() for operand in operands]


def plain_mixture(operands: Tensors, right: Tensor, criterion: Criterion, of_losses: bool) -> Tensor:
    logits, mixing, right = F.linear(*operands[:3])[:, COUNTED], operands[3][:, COUNTED], right[COUNTED]
    if of_losses:
        return sum((mixing[0, :, k] * criterion(logits[:, :, k], right)[0]).sum() for k in range(K))
    return criterion((mixing[..., None] * logits.softmax(-1)).sum(2).log(), right)[0].sum()


@pytest.mark.parametrize("leaves_out", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [2**24, 3 * V * K, 1], ids=["whole", "chunks", "single"])
@pytest.mark.parametrize(
    ("criterion", "copies", "of_losses"),
    [(LIKELIHOOD, 1, False), (LIKELIHOOD, 1, True), (R_DROP, 2, False)],
    ids=["mean", "losses", "r_drop"],
)
def test_a_mixtures_loss_and_gradients_equal_the_formula(
    criterion: Criterion, copies: int, of_losses: bool, chunk: int, leaves_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "leaves_out", lambda _: leaves_out)
    operands, right = mixture(copies)
    inputs, others = leaves(operands), leaves(operands)
    mixed, sizes = mean_over_mixture if of_losses else of_mixture, ChunkSizes(chunk, max(1, chunk // 2))
    given = *inputs[:3], COUNTED, mixed(criterion), right
    total, terms = output_loss(*given, shares=inputs[3], layout=SeveralReadouts, sizes=sizes)
    expected = plain_mixture(others, right, criterion, of_losses)
    torch.testing.assert_close(total, expected, **EXACT)
    assert not terms["loss"][~COUNTED].any()
    found, wanted = torch.autograd.grad(3 * total, inputs), torch.autograd.grad(3 * expected, others)
    present = inputs[3] > 0  # readouts with weight 0 are skipped and get no gradient
    for one, other, keep in zip(found, wanted, (present[..., None], True, True, present), strict=True):
        torch.testing.assert_close(one, other * keep, **EXACT)


def test_the_term_is_the_negative_log_likelihood_of_the_mixture() -> None:
    (readouts, weight, bias, mixing), right = mixture()
    given = readouts, weight, bias, COUNTED, of_mixture(LIKELIHOOD), right
    _, terms = output_loss(*given, shares=mixing, layout=SeveralReadouts)
    log_probs = mixture_log_probs(readouts[0], weight, bias, mixing[0])
    probs = (mixing[0, ..., None] * (readouts[0] @ weight.T + bias).softmax(-1)).sum(1)
    torch.testing.assert_close(log_probs[COUNTED], probs[COUNTED].log(), **EXACT)
    torch.testing.assert_close(terms["loss"][COUNTED], -log_probs[range(M), right][COUNTED], **EXACT)


def test_many_chunks_under_autocast_do_not_round_the_sum_of_their_gradients() -> None:
    rows, weight, bias = torch.randn(512, 2, 16), torch.randn(40, 16).requires_grad_(), torch.randn(40)
    shares, chosen = torch.full((512, 2), 0.5), torch.randint(40, (512,))
    (exact,) = torch.autograd.grad(target_log_probs(rows, weight, bias, shares, chosen).sum(), weight)
    for chunk in (2**24, 2 * 40):  # one chunk, and one for each two readouts
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = target_log_probs(rows, weight, bias, shares, chosen, ChunkSizes(chunk))
        (gradient,) = torch.autograd.grad(log_probs.sum(), weight)
        assert (gradient - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("leaves_out", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [2**24, 2 * V])
def test_target_log_probs_equal_the_formula_and_their_gradients_differences(
    chunk: int, leaves_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "leaves_out", lambda _: leaves_out)
    (readouts, weight, bias, mixing), right = mixture()
    inputs, mixing, sizes = (readouts[0], weight, bias), mixing[0], ChunkSizes(chunk)
    log_probs = F.linear(*inputs).log_softmax(-1)
    expected = log_probs.gather(-1, right[:, None, None].expand(-1, K, 1))[..., 0]
    torch.testing.assert_close(target_log_probs(*inputs, mixing, right, sizes), expected * (mixing > 0), **EXACT)
    assert target_log_probs(inputs[0][:0], weight, bias, mixing[:0], right[:0]).shape == (0, K)
    assert torch.autograd.gradcheck(lambda *each: target_log_probs(*each, mixing, right, sizes), leaves(inputs))


@pytest.mark.parametrize("chunk", [2**24, 3 * V, 1], ids=["whole", "chunks", "single"])
@OF_ONE_OR_TWO
def test_the_loss_and_gradients_with_copies_equal_the_formula(criterion: Criterion, copies: int, chunk: int) -> None:
    operands = [drawn(copies, B * T, R), drawn(V, R), drawn(V), shares_of(copies, B * T, 1 + S)]
    source, right, counted = torch.randint(4, (B, S)), torch.randint(V, (B * T,)), torch.rand(B * T) > 0.2
    inputs, others, sentences = leaves(operands), leaves(operands), torch.arange(B).repeat_interleave(T)
    given = *inputs[:3], counted, with_copies(criterion, source), sentences, right
    sizes = ChunkSizes(chunk, max(1, chunk // 2))
    total, terms = output_loss(*given, shares=inputs[3], sizes=sizes)
    readouts, weight, bias, shares = others
    probs = (readouts @ weight.T + bias).softmax(-1) * shares[..., :1]
    one_hot = torch.eye(V, dtype=torch.float64)[source[sentences]]  # (B T, S, V): the source token of each position
    probs = probs + torch.einsum("cns,nsv->cnv", shares[..., 1:], one_hot)
    loss, named = criterion(probs.log(), right)
    expected = loss[counted].sum()
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(terms["loss"], named["loss"] * counted, **EXACT)
    found, wanted = torch.autograd.grad(3 * total, inputs), torch.autograd.grad(3 * expected, others)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
