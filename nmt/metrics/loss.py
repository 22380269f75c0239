"""Cross-entropy of the output layer, without ever holding the distributions of all positions.

Shapes: N target positions without padding, R readout, V vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_NUMBERS = 2**24  # of float32 logits held at a time: 64 MiB


class Loss(NamedTuple):
    """Sums over target tokens, in nats."""

    smoothed: Tensor  # () what is minimised; differentiable
    nll: Tensor  # () negative log-likelihood; not differentiable
    log_probs: Tensor  # (N,) of the right tokens, of which nll is the negative sum; not differentiable


def linear_cross_entropy(
    readouts: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float = 0.0
) -> Loss:
    """(N, R), (V, R), (V,), (N,) -> sums over N of the label-smoothed and the plain cross-entropy.

    The distribution aimed at is (1 - smoothing) on the right token plus smoothing / V on every token (Szegedy et
    al. 2016, section 7), so for log-probabilities p:  loss = -(1 - smoothing) p_target - smoothing mean(p).
    They are made chunk by chunk, and the gradient with them: memory holds one chunk, not (N, V).
    """
    smoothed, log_probs = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, targets, smoothing, torch.is_grad_enabled()
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
        smoothing: float,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(torch.float32, weight.dtype)
        smoothed = torch.zeros((), dtype=wide, device=weight.device)
        found = torch.empty(targets.shape[0], dtype=wide, device=weight.device)
        grads = [torch.zeros_like(tensor, dtype=wide) for tensor in (readouts, weight, bias) if differentiate]
        rows = max(1, CHUNK_NUMBERS // weight.shape[0])
        for start in range(0, targets.shape[0], rows):
            part, target = readouts[start : start + rows], targets[start : start + rows, None]
            log_probs = F.linear(part, weight, bias).log_softmax(-1, dtype=wide)
            right = log_probs.gather(1, target)
            found[start : start + rows] = right[:, 0]
            average = log_probs.mean(-1, keepdim=True) if smoothing else right
            smoothed -= ((1 - smoothing) * right + smoothing * average).sum()
            if differentiate:
                error = log_probs.exp_()  # the distribution, then minus the one that is aimed at
                if smoothing:
                    error -= smoothing / weight.shape[0]
                error.scatter_add_(1, target, torch.full_like(right, smoothing - 1))
                grads[2] += error.sum(0)
                error = error.to(part.dtype)
                grads[0][start : start + rows] = error @ weight.to(part.dtype)
                grads[1] += error.t() @ part
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(found)
        ctx.dtypes = (readouts.dtype, weight.dtype, bias.dtype)
        return smoothed, found

    @staticmethod
    def backward(ctx: Any, grad_smoothed: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        scaled = ((grad * grad_smoothed).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *scaled, None, None, None


def perplexity(nll: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood; infinity where it does not fit a float."""
    try:
        return math.exp(nll / max(1, tokens))
    except OverflowError:
        return math.inf
