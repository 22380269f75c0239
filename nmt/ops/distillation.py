"""Cross-entropy to targets and divergence from teachers, without ever holding the distributions of all positions.

Shapes: N target positions, n of them, R readout (each model has its own), V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.cross_entropy import save_gradients, take_gradients
from nmt.ops.matmul import matmul
from nmt.ops.output_layer import probabilities, through_logits
from nmt.ops.shared import in_autocast_dtype

Operands = tuple[Tensor, Tensor, Tensor]
"""Of logits: readouts (N, R), weight (V, R), bias (V,)."""


class DistillationLoss(NamedTuple):
    """Sums over target tokens, in nats."""

    total: Tensor  # () what is minimised; differentiable
    smoothed: Tensor  # () label-smoothed cross-entropy; not differentiable
    nll: Tensor  # () negative log-likelihood; not differentiable
    divergence: Tensor  # () KL(q || p), of the teachers' mean q; not differentiable


def linear_distillation(
    readouts: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    teachers: Sequence[Operands],
    share: float,
    smoothing: float = 0.0,
    pad: int | None = None,
) -> DistillationLoss:
    """(N, R), (V, R), (V,), (N,), those of each teacher's logits -> sums over N of

    total = (1 - share) CE + share KL(q || p), with q the mean of the teachers' distributions: word-level knowledge
    distillation (Kim and Rush 2016, 3.1), but for q's entropy, which no weight changes. CE is label-smoothed as in
    `linear_cross_entropy`. Positions whose target is `pad` add nothing. No gradient goes to the teachers.
    """
    real = torch.ones_like(targets, dtype=torch.bool) if pad is None else targets != pad
    found = _LinearDistillation.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, targets, real, teachers, (share, smoothing), torch.is_grad_enabled()
    )
    return DistillationLoss(*found)


class _LinearDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        real: Tensor,
        teachers: Sequence[Operands],
        shares: tuple[float, float],
        differentiate: bool,
    ) -> tuple[Tensor, ...]:
        share, smoothing = shares
        wide = torch.promote_types(torch.float32, weight.dtype)
        smoothed, nll, divergence = (torch.zeros((), dtype=wide, device=weight.device) for _ in range(3))
        counts = real.to(wide)  # 1 or 0
        others = [tuple(map(in_autocast_dtype, operands)) for operands in teachers]

        def criterion(logits: Tensor, few: slice) -> Tensor | None:
            target, counted = targets[few, None], counts[few, None]
            probs, right, log_sum = probabilities(logits[0], target, wide)
            right -= log_sum
            average = logits[0].mean(-1, keepdim=True, dtype=wide) - log_sum
            smoothed.sub_((((1 - smoothing) * right + smoothing * average) * counted).sum())
            nll.sub_((right * counted).sum())
            taught = _mean_probabilities([(its[few], table, its_bias) for its, table, its_bias in others], wide)
            cross = log_sum[:, 0] - torch.linalg.vecdot(taught, logits[0].to(wide))
            divergence.add_(((cross + torch.xlogy(taught, taught).sum(-1)) * counted[:, 0]).sum())
            if not differentiate:
                return None
            probs.sub_(taught, alpha=share)
            probs.scatter_add_(1, target, torch.full_like(right, (1 - share) * (smoothing - 1)))
            if smoothing:
                probs.sub_((1 - share) * smoothing / weight.shape[0])
            return probs[None]

        save_gradients(ctx, (readouts, weight, bias), through_logits(readouts[None], weight, bias, counts, criterion))
        ctx.mark_non_differentiable(smoothed, nll, divergence)
        return (1 - share) * smoothed + share * divergence, smoothed, nll, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return *take_gradients(ctx, grad_total), None, None, None, None, None


def _mean_probabilities(teachers: Sequence[Operands], wide: torch.dtype) -> Tensor:
    """Those of the same positions -> (n, V)."""
    total, *others = (matmul(*operands).softmax(-1, dtype=wide) for operands in teachers)
    for other in others:
        total += other
    return total.div_(len(teachers))
