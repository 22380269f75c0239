"""Losses and probabilities of mixtures, compared with their plain formulas in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from nmt.ops import output_loss as module
from nmt.ops.output_loss import (
    ChunkSizes,
    Criterion,
    SeveralReadouts,
    mean_over_mixture,
    mixture_log_probs,
    of_mixture,
    output_loss,
    target_log_probs,
)
from nmt.training.losses import likelihood, r_drop

N, K, R, V = 7, 4, 5, 11
EXACT = {"rtol": 1e-10, "atol": 1e-10}
LIKELIHOOD = partial(likelihood, smoothing=0.1)


class Problem:
    """Readouts of C passes, an output layer, mixture weights with some zeros, targets, and the positions that count."""

    def __init__(self, copies: int = 1) -> None:
        generator = torch.Generator().manual_seed(3)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, dtype=torch.float64)

        mixing = drawn(copies, N, K).softmax(-1) * (torch.rand(copies, N, K, generator=generator) > 0.3)
        mixing[..., 0] += 0.1
        mixing = mixing / mixing.sum(-1, keepdim=True)
        self.operands = [drawn(copies, N, K, R), drawn(V, R), drawn(V), mixing]
        self.operands[3][:, 5] = 0.0  # row 5 is padding
        self.targets = torch.randint(V, (N,), generator=generator)
        self.counted = torch.arange(N) != 5

    def inputs(self) -> list[Tensor]:
        return [operand.clone().requires_grad_() for operand in self.operands]


def naive(inputs: list[Tensor], problem: Problem, criterion: Criterion, of_losses: bool) -> Tensor:
    """Compute the loss of a mixture position by position."""
    readouts, weight, bias, mixing = inputs
    total = readouts.new_zeros(())
    for n in range(N):
        if not problem.counted[n]:
            continue
        logits = readouts[:, n] @ weight.T + bias  # (C, K, V) logits of position n
        target = problem.targets[n : n + 1]
        if of_losses:
            total = total + sum(mixing[0, n, k] * criterion(logits[:1, k, None], target)[0].sum() for k in range(K))
        else:
            probs = (mixing[:, n, :, None] * logits.softmax(-1)).sum(1, keepdim=True)
            total = total + criterion(probs.log(), target)[0].sum()
    return total


@pytest.mark.parametrize("leaves_out", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [2**24, 3 * V * K, 1], ids=["whole", "chunks", "single"])
@pytest.mark.parametrize(
    ("criterion", "copies", "of_losses"),
    [
        (LIKELIHOOD, 1, False),
        (LIKELIHOOD, 1, True),
        (partial(r_drop, alpha=3.0, smoothing=0.1), 2, False),
    ],
    ids=["mean", "losses", "r_drop"],
)
def test_loss_and_gradients_equal_the_formula(
    criterion: Criterion, copies: int, of_losses: bool, chunk: int, leaves_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "leaves_out", lambda _: leaves_out)
    problem = Problem(copies)
    inputs, others = problem.inputs(), problem.inputs()
    mixed = mean_over_mixture if of_losses else of_mixture
    given = *inputs[:3], problem.counted, mixed(criterion), problem.targets
    sizes = ChunkSizes(chunk, max(1, chunk // 2))
    total, terms = output_loss(*given, shares=inputs[3], layout=SeveralReadouts, sizes=sizes)
    expected = naive(others, problem, criterion, of_losses)
    torch.testing.assert_close(total, expected, **EXACT)
    assert not terms["loss"][5]
    found = torch.autograd.grad(3 * total, inputs)
    wanted = torch.autograd.grad(3 * expected, others)
    present = inputs[3] > 0  # readouts with weight 0 are skipped and get no gradient
    for one, other, keep in zip(found, wanted, (present[..., None], True, True, present), strict=True):
        torch.testing.assert_close(one, other * keep, **EXACT)


def test_the_term_is_the_negative_log_likelihood_of_the_mixture() -> None:
    problem = Problem()
    readouts, weight, bias, mixing = problem.operands
    given = readouts, weight, bias, problem.counted, of_mixture(LIKELIHOOD), problem.targets
    _, terms = output_loss(*given, shares=mixing, layout=SeveralReadouts)
    log_probs = mixture_log_probs(readouts[0], weight, bias, mixing[0])
    probs = (mixing[0, ..., None] * (readouts[0] @ weight.T + bias).softmax(-1)).sum(1)
    torch.testing.assert_close(log_probs[problem.counted], probs[problem.counted].log(), **EXACT)
    chosen = log_probs[torch.arange(N), problem.targets]
    torch.testing.assert_close(terms["loss"][problem.counted], -chosen[problem.counted], **EXACT)


def test_many_chunks_under_autocast_do_not_round_the_sum_of_their_gradients() -> None:
    torch.manual_seed(0)
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
    problem = Problem()
    readouts, weight, bias, mixing = problem.operands
    sizes = ChunkSizes(chunk)
    found = target_log_probs(readouts[0], weight, bias, mixing[0], problem.targets, sizes)
    log_probs = (readouts[0] @ weight.T + bias).log_softmax(-1)
    expected = log_probs.gather(-1, problem.targets[:, None, None].expand(-1, K, 1))[..., 0]
    torch.testing.assert_close(found, expected * (mixing[0] > 0), **EXACT)
    assert target_log_probs(readouts[0, :0], weight, bias, mixing[0, :0], problem.targets[:0]).shape == (0, K)
    inputs = tuple(part.requires_grad_() for part in (readouts[0].clone(), weight.clone(), bias.clone()))
    assert torch.autograd.gradcheck(lambda *each: target_log_probs(*each, mixing[0], problem.targets, sizes), inputs)
