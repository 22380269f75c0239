"""Copies of source tokens mixed into distributions, compared with plain operations in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from nmt.ops.output_loss import ChunkSizes, Criterion, output_loss, with_copies
from nmt.training.losses import likelihood, r_drop

B, T, S, R, V = 3, 4, 5, 6, 11
EXACT = {"rtol": 1e-10, "atol": 1e-10}
LIKELIHOOD = partial(likelihood, smoothing=0.1)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def problem(copies: int = 1) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Draw operands (readouts, output layer, shares with some zeros), source tokens that repeat, targets, and a mask of
    the positions that count.
    """
    shares = drawn(copies, B * T, 1 + S).softmax(-1) * (torch.rand(copies, B * T, 1 + S) > 0.2)
    shares[..., 0] += 0.1
    shares /= shares.sum(-1, keepdim=True)
    operands = [drawn(copies, B * T, R), drawn(V, R), drawn(V), shares]
    return operands, torch.randint(4, (B, S)), torch.randint(V, (B * T,)), torch.rand(B * T) > 0.2


@pytest.mark.parametrize("chunk", [2**24, 3 * V, 1], ids=["whole", "chunks", "single"])
@pytest.mark.parametrize(
    ("criterion", "copies"), [(LIKELIHOOD, 1), (partial(r_drop, alpha=3.0, smoothing=0.1), 2)], ids=["one", "r_drop"]
)
def test_loss_and_gradients_equal_the_formula(criterion: Criterion, copies: int, chunk: int) -> None:
    operands, source, targets, counted = problem(copies)
    inputs, others = ([operand.clone().requires_grad_() for operand in operands] for _ in range(2))
    sentences = torch.arange(B).repeat_interleave(T)
    total, terms = output_loss(
        *inputs[:3],
        counted,
        with_copies(criterion, source),
        sentences,
        targets,
        shares=inputs[3],
        sizes=ChunkSizes(chunk, max(1, chunk // 2)),
    )
    readouts, weight, bias, shares = others
    probs = (readouts @ weight.T + bias).softmax(-1) * shares[..., :1]
    one_hot = torch.eye(V, dtype=torch.float64)[source[sentences]]  # (B T, S, V): the source token of each position
    probs = probs + torch.einsum("cns,nsv->cnv", shares[..., 1:], one_hot)
    loss, named = criterion(probs.log(), targets)
    expected = loss[counted].sum()
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(terms["loss"], named["loss"] * counted, **EXACT)
    found, wanted = torch.autograd.grad(3 * total, inputs), torch.autograd.grad(3 * expected, others)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
