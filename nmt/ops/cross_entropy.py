"""Cross-entropy of the output layer, without ever holding the distributions of all positions.

Shapes: N target positions, R readout, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.matmul import input_gradient, matmul, weight_gradient
from nmt.ops.shared import in_autocast_dtype

CHUNK_NUMBERS = 2**24  # of logits held at a time: 64 MiB in float32
CACHED_NUMBERS = 2**20  # of probabilities made of them at a time on a CPU: 4 MiB, which stay in its cache


class Loss(NamedTuple):
    """Sums over target tokens, in nats."""

    smoothed: Tensor  # () what is minimised; differentiable
    nll: Tensor  # () negative log-likelihood; not differentiable
    log_probs: Tensor  # (N,) of the right tokens, of which nll is the negative sum; not differentiable


def linear_cross_entropy(
    readouts: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float = 0.0, pad: int | None = None
) -> Loss:
    """(N, R), (V, R), (V,), (N,) -> sums over N of the label-smoothed and the plain cross-entropy.

    The distribution aimed at is (1 - smoothing) on the right token plus smoothing / V on every token (Szegedy et
    al. 2016, section 7), so for log-probabilities p:  loss = -(1 - smoothing) p_target - smoothing mean(p).
    Positions whose target is `pad` add nothing. Memory holds one chunk of logits, which become their own gradient in
    place, and of probabilities what fits a cache (on a GPU as many).
    """
    real = torch.ones_like(targets, dtype=torch.bool) if pad is None else targets != pad
    smoothed, log_probs = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, targets, real, smoothing, torch.is_grad_enabled()
    )
    return Loss(smoothed, -log_probs.sum(), log_probs)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        real: Tensor,
        smoothing: float,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(torch.float32, weight.dtype)
        smoothed = torch.zeros((), dtype=wide, device=weight.device)
        found = torch.empty(targets.shape[0], dtype=wide, device=weight.device)
        grads: list[list[Tensor]] = [[], [], []]  # by chunk: of readouts, weight, bias
        ctx.dtypes = readouts.dtype, weight.dtype, bias.dtype
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        cached = CACHED_NUMBERS if weight.device.type == "cpu" else CHUNK_NUMBERS
        for rows in _chunks(targets.shape[0], weight.shape[0], CHUNK_NUMBERS):
            logits = matmul(readouts[rows], weight, bias)
            counts = real[rows, None].to(wide)  # 1 or 0
            of_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)
            for few in _chunks(logits.shape[0], weight.shape[0], cached):
                target, counted = targets[rows][few, None], counts[few]
                probs, right, average = _probabilities(logits[few], target, wide)
                found[rows][few] = (right * counted)[:, 0]
                smoothed -= (((1 - smoothing) * right + smoothing * average) * counted).sum()
                if differentiate:
                    probs.scatter_add_(1, target, torch.full_like(right, smoothing - 1))
                    if smoothing:
                        probs.sub_(smoothing / weight.shape[0])
                    of_bias.addmv_(probs.t(), counted[:, 0])
                    logits[few] = probs
            if differentiate:
                counts = counts.to(logits.dtype)
                grads[0].append(input_gradient(logits, weight) * counts)
                _add(grads[1], weight_gradient(readouts[rows] * counts, logits).to(wide))
                _add(grads[2], of_bias)
        if differentiate:
            ctx.grads = torch.cat(grads[0]), grads[1][0], grads[2][0]
        ctx.mark_non_differentiable(found)
        return smoothed, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_smoothed: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grads, ctx.grads = ctx.grads, None  # handed over, not copied: the weight's is as large as the weight
        if grads is None:
            raise RuntimeError("the loss can go backward only once")
        scaled = (grad.mul_(grad_smoothed).to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))
        return *scaled, None, None, None, None


def _chunks(rows: int, columns: int, numbers: int) -> Iterator[slice]:
    """The rows of a (rows, columns) matrix in chunks of so many numbers, at least one row each."""
    size = max(1, numbers // columns)
    for start in range(0, rows, size):
        yield slice(start, start + size)


def _probabilities(logits: Tensor, target: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(N, V), (N, 1) -> p (N, V), log p of the target (N, 1), and the mean log p of all (N, 1)."""
    probs = logits.softmax(-1, dtype=wide)
    # By way of the most probable token, whose probability is at least 1 / V: the sum's logarithm loses nothing.
    log_sum = logits.amax(-1, keepdim=True).to(wide) - probs.amax(-1, keepdim=True).log_()
    return probs, logits.gather(1, target).to(wide) - log_sum, logits.mean(-1, keepdim=True, dtype=wide) - log_sum


def _add(total: list[Tensor], part: Tensor) -> None:
    """The first of them is the sum, so that a single one is neither copied nor added."""
    if total:
        total[0] += part
    else:
        total.append(part)
