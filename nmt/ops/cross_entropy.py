"""Cross-entropy of the output layer, without ever holding the distributions of all positions.

Shapes: N target positions, R readout, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.output_layer import Gradients, probabilities, through_logits


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
    Positions whose target is `pad` add nothing.
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
        counts = real.to(wide)  # 1 or 0

        def criterion(logits: Tensor, few: slice) -> Tensor | None:
            target, counted = targets[few, None], counts[few, None]
            probs, right, log_sum = probabilities(logits[0], target, wide)
            right -= log_sum
            average = logits[0].mean(-1, keepdim=True, dtype=wide) - log_sum
            found[few] = (right * counted)[:, 0]
            smoothed.sub_((((1 - smoothing) * right + smoothing * average) * counted).sum())
            if not differentiate:
                return None
            probs.scatter_add_(1, target, torch.full_like(right, smoothing - 1))
            if smoothing:
                probs.sub_(smoothing / weight.shape[0])
            return probs[None]

        save_gradients(ctx, (readouts, weight, bias), through_logits(readouts[None], weight, bias, counts, criterion))
        ctx.mark_non_differentiable(found)
        return smoothed, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_smoothed: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return *take_gradients(ctx, grad_smoothed), None, None, None, None


def save_gradients(ctx: Any, tensors: tuple[Tensor, Tensor, Tensor], grads: Gradients | None) -> None:  # noqa: ANN401
    """The gradients of readouts, weight and bias, for `take_gradients` in the backward pass."""
    ctx.grads, ctx.like = grads, [(tensor.shape, tensor.dtype) for tensor in tensors]


def take_gradients(ctx: Any, factor: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
    """What was kept, times a factor. Raises RuntimeError the second time: the weight's is as large as the weight, and
    is handed over, not copied."""
    grads, ctx.grads = ctx.grads, None
    if grads is None:
        raise RuntimeError("the loss can go backward only once")
    return tuple(grad.mul_(factor).view(shape).to(dtype) for grad, (shape, dtype) in zip(grads, ctx.like, strict=True))
