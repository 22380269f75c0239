"""Products with an operand that a loop uses at every step: one product makes its gradient after the loop.

Shapes: D operands side by side, or none, N rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nmt.ops.matmul import is_own, matmul, weight_gradient
from nmt.ops.shared import in_loop, share


class Linear(nn.Linear):
    """nn.Linear for use inside of loops; the same everywhere else."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b: (..., I), (O, I), (O,) -> (..., O), or for D of them (D, N, I), (D, O, I), (D, O) -> (D, N, O)."""
    if in_loop() or (torch.is_grad_enabled() and is_own(inputs, weight)):
        shared = share((weight, bias), _linear_gradients)
        applied: Tensor = _Linear.apply(inputs, shared.token, shared.gathered, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return matmul(inputs, weight, bias)


def product(inputs: Tensor, operand: Tensor) -> Tensor:
    """x A: (D, N, I), (D, I, O) -> (D, N, O)."""
    if in_loop():
        shared = share((operand,), _product_gradients)
        applied: Tensor = _Product.apply(inputs, shared.token, shared.gathered, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return torch.bmm(inputs, operand)


def _linear_gradients(gathered: list[Any]) -> tuple[Tensor, Tensor | None]:
    inputs, grads, with_bias = _together(gathered)
    return weight_gradient(inputs, grads), _wide_sum(grads) if with_bias else None


def _product_gradients(gathered: list[Any]) -> tuple[Tensor]:
    inputs, grads, _ = _together(gathered)
    return (inputs.mT @ grads,)


def _together(gathered: list[Any]) -> tuple[Tensor, Tensor, bool]:
    """The rows of all steps: (..., N, I), (..., N, O)."""
    inputs, grads, with_bias = zip(*gathered, strict=True)
    return torch.cat(inputs, dim=-2), torch.cat(grads, dim=-2), with_bias[0]


def _wide_sum(grads: Tensor) -> Tensor:
    return grads.sum(-2, dtype=torch.promote_types(grads.dtype, torch.float32))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs: Tensor,
        token: Tensor,
        gathered: list[Any],
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.gathered, ctx.with_bias, ctx.dtype = gathered, bias is not None, inputs.dtype
        inputs = inputs.to(weight.dtype)
        ctx.save_for_backward(inputs, weight)
        return matmul(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            rows = (inputs, grad) if weight.dim() > 2 else (inputs.flatten(0, -2), grad.flatten(0, -2))  # noqa: PLR2004
            ctx.gathered.append((*rows, ctx.with_bias))
        return matmul(grad, weight.mT).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, token: Tensor, gathered: list[Any], operand: Tensor) -> Tensor:  # noqa: ANN401
        ctx.gathered, ctx.dtype = gathered, inputs.dtype
        inputs = inputs.to(operand.dtype)
        ctx.save_for_backward(inputs, operand)
        return torch.bmm(inputs, operand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, operand = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.gathered.append((inputs, grad, False))
        return (grad @ operand.mT).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None
