"""Cross-entropy of two predictions of one batch and their divergence, made of one set of logits.

Shapes: N target positions, n of them, R readout, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.cross_entropy import save_gradients, take_gradients
from nmt.ops.output_layer import probabilities, through_logits


class RDropLoss(NamedTuple):
    """Sums over target tokens, in nats."""

    total: Tensor  # () what is minimised; differentiable
    smoothed: Tensor  # () label-smoothed cross-entropy, the mean of both predictions; not differentiable
    nll: Tensor  # () negative log-likelihood, the mean of both; not differentiable
    divergence: Tensor  # () 1/2 (KL(p1 || p2) + KL(p2 || p1)); not differentiable


def linear_r_drop(
    readouts: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    alpha: float,
    smoothing: float = 0.0,
    pad: int | None = None,
) -> RDropLoss:
    """(2, N, R), (V, R), (V,), (N,) -> sums over N of half the loss of Liang et al. (2021, eq. 4):

    total = 1/2 (CE_1 + CE_2) + alpha/2 * 1/2 (KL(p1 || p2) + KL(p2 || p1)), the CE_i label-smoothed as in
    `linear_cross_entropy`; the gradient goes through both sides of each KL. Positions whose target is `pad` add
    nothing.
    """
    real = torch.ones_like(targets, dtype=torch.bool) if pad is None else targets != pad
    found = _LinearRDrop.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, targets, real, alpha, smoothing, torch.is_grad_enabled()
    )
    return RDropLoss(*found)


class _LinearRDrop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        real: Tensor,
        alpha: float,
        smoothing: float,
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(torch.float32, weight.dtype)
        smoothed, nll, divergence = (torch.zeros((), dtype=wide, device=weight.device) for _ in range(3))
        counts = real.to(wide)  # 1 or 0
        share = alpha / 4  # of each KL

        def criterion(logits: Tensor, few: slice) -> Tensor | None:
            target, counted = targets[few, None].expand(2, -1, 1), counts[few, None]
            probs, right, log_sum = probabilities(logits, target, wide)
            right -= log_sum
            average = logits.mean(-1, keepdim=True, dtype=wide) - log_sum
            smoothed.sub_((((1 - smoothing) * right + smoothing * average) * counted).sum() / 2)
            nll.sub_((right * counted).sum() / 2)
            ratio = logits[0].to(wide).sub_(logits[1]).sub_(log_sum[0] - log_sum[1])  # log p1 - log p2
            signed = torch.linalg.vecdot(probs, ratio)[..., None]  # KL(p1 || p2), -KL(p2 || p1)
            divergence.add_(((signed[0] - signed[1]) * counted).sum() / 2)
            return _gradient(probs, ratio, signed, target, share, smoothing) if differentiate else None

        save_gradients(ctx, (readouts, weight, bias), through_logits(readouts, weight, bias, counts, criterion))
        ctx.mark_non_differentiable(smoothed, nll, divergence)
        return smoothed + alpha / 2 * divergence, smoothed, nll, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return *take_gradients(ctx, grad_total), None, None, None, None, None


def _gradient(probs: Tensor, ratio: Tensor, signed: Tensor, target: Tensor, share: float, smoothing: float) -> Tensor:
    """(2, n, V), (n, V), (2, n, 1), (2, n, 1) -> (2, n, V), with respect to the logits.

    Of KL(p || q) it is p (log p - log q - KL) with respect to those of p, and q - p with respect to those of q.
    """
    grads = torch.empty_like(probs)
    for this, other, sign in ((0, 1, 1), (1, 0, -1)):
        factor = 0.5 + share - share * sign * signed[this]  # of the probability, but for the ratio
        torch.add(factor, ratio, alpha=share * sign, out=grads[this])
        grads[this].mul_(probs[this]).sub_(probs[other], alpha=share)
    grads.scatter_add_(-1, target, grads.new_full((), (smoothing - 1) / 2).expand(target.shape))
    return grads.sub_(smoothing / (2 * probs.shape[-1])) if smoothing else grads
