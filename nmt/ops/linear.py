"""Products with a weight that a loop uses at every step; its gradient is one product after the loop.

Shapes: D operands, if several are multiplied side by side, N rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nmt.ops.matmul import input_gradient, matmul, uses_onednn, weight_gradient
from nmt.ops.packed import Weight
from nmt.ops.precision import wide_dtype
from nmt.ops.shared import defer_gradient, in_loop

PENDING_ELEMENTS = 2**24  # of stored inputs and gradients, above which they are reduced to a product


class Linear(nn.Linear):
    """nn.Linear, faster inside loops, and on processors where torch's own products are slow."""

    packed: Weight | None = None  # replaces the weight in search

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return linear(inputs, self.weight if self.packed is None else self.packed, self.bias)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x W' + b: (..., I), (O, I), (O,) -> (..., O), or with D operands (D, N, I), (D, O, I), (D, O) -> (D, N, O)."""
    if not isinstance(weight, Tensor):
        return weight.product(inputs, bias)
    if in_loop() or (torch.is_grad_enabled() and uses_onednn(inputs, weight)):
        shared = defer_gradient((weight, bias), _linear_gradients)
        applied: Tensor = _Linear.apply(inputs, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return matmul(inputs, weight, bias)


def product(inputs: Tensor, operand: Tensor) -> Tensor:
    """x A: (D, N, I), (D, I, O) -> (D, N, O)."""
    if in_loop():
        shared = defer_gradient((operand,), _product_gradients)
        applied: Tensor = _Product.apply(inputs, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return torch.bmm(inputs, operand)


class _Pending:
    """Inputs (..., N, I) and gradients (..., N, O) of the backward steps so far, and the sum of those already
    reduced."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.elements = 0
        self.total: tuple[Tensor, Tensor] | None = None  # gradient of the weight, of the bias

    def add(self, inputs: Tensor, grads: Tensor) -> None:
        self.inputs.append(inputs)
        self.grads.append(grads)
        self.elements += inputs.numel() + grads.numel()
        if self.elements > PENDING_ELEMENTS:
            self.fold()

    def fold(self) -> tuple[Tensor, Tensor]:
        """Reduce all stored steps by one product. Returns the gradients so far."""
        if self.inputs:
            inputs, grads = (_joined(each) for each in (self.inputs, self.grads))
            dtype = wide_dtype(grads.dtype)
            total = weight_gradient(inputs, grads), grads.sum(-2, dtype=dtype)
            if self.total is not None:
                total = self.total[0].to(dtype) + total[0], self.total[1] + total[1]
            self.inputs, self.grads, self.elements, self.total = [], [], 0, total
        assert self.total is not None
        return self.total


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _store(pending: list[Any], inputs: Tensor, grads: Tensor) -> None:
    if not pending:
        pending.append(_Pending())
    pending[0].add(inputs, grads)


def _linear_gradients(pending: list[Any]) -> tuple[Tensor, Tensor]:
    folded: tuple[Tensor, Tensor] = pending[0].fold()
    return folded


def _product_gradients(pending: list[Any]) -> tuple[Tensor]:
    return (pending[0].fold()[0].mT,)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs: Tensor,
        anchor: Tensor,
        pending: list[Any],
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.pending, ctx.dtype = pending, inputs.dtype
        inputs = inputs.to(weight.dtype)
        ctx.save_for_backward(inputs, weight)
        return matmul(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            rows = (inputs, grad) if weight.dim() > 2 else (inputs.flatten(0, -2), grad.flatten(0, -2))  # noqa: PLR2004
            _store(ctx.pending, *rows)
        return input_gradient(grad, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, anchor: Tensor, pending: list[Any], operand: Tensor) -> Tensor:  # noqa: ANN401
        ctx.pending, ctx.dtype = pending, inputs.dtype
        inputs = inputs.to(operand.dtype)
        ctx.save_for_backward(inputs, operand)
        return torch.bmm(inputs, operand)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, operand = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            _store(ctx.pending, inputs, grad)
        return (grad @ operand.mT).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None
