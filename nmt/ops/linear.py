"""The matrix products and gates of recurrent steps, with gradients by hand.

The gradient of a weight that a loop uses at every step is one product after the loop. On a CPU, torch computes float32
products with MKL, which uses only half the vector width on AMD processors, and bfloat16 products with oneDNN, which has
no such limit: here oneDNN computes both on AMD.

Shapes: D operands, if several are multiplied side by side, N rows, I inputs, O outputs, H hidden, ... batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nmt.ops.packed import Weight
from nmt.ops.precision import wide_dtype
from nmt.ops.shared import defer_gradient, in_loop
from nmt.system.machine import cpu_vendor

PENDING_ELEMENTS = 2**24  # of stored inputs and gradients, above which they are reduced to a product
MAX_SEPARATE = 4  # operands up to which oneDNN computes their products one by one
# Elements of a weight below which oneDNN costs more than it saves: a call, and a kernel for each new number of rows.
MIN_WEIGHT = 2**14
_onednn = None
if cpu_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


class Linear(nn.Linear):
    """nn.Linear, faster inside loops and on processors where torch's own products are slow."""

    packed: Weight | None = None  # replaces the weight in search

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return linear(inputs, self.weight if self.packed is None else self.packed, self.bias)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b: (..., I), (O, I), (O,) -> (..., O), or with D operands (D, N, I), (D, O, I), (D, O) ->
    (D, N, O)."""
    if not isinstance(weight, Tensor):
        return weight.product(inputs, bias)
    if in_loop() or (torch.is_grad_enabled() and uses_onednn(inputs, weight)):
        shared = defer_gradient((weight, bias), _linear_gradients)
        applied: Tensor = _Linear.apply(inputs, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return matmul(inputs, weight, bias)


def product(inputs: Tensor, operand: Tensor) -> Tensor:
    """Compute x A: (D, N, I), (D, I, O) -> (D, N, O)."""
    if in_loop():
        shared = defer_gradient((operand,), _product_gradients)
        applied: Tensor = _Product.apply(inputs, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return torch.bmm(inputs, operand)


def uses_onednn(inputs: Tensor, weight: Tensor) -> bool:
    """Check if oneDNN's own function, which autograd cannot differentiate, computes the product."""
    return (
        _onednn is not None
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.device.type == "cpu"
        and (weight.dim() == 2 or len(weight) <= MAX_SEPARATE)  # noqa: PLR2004
        and inputs.numel() > 0
        and weight.shape[-2] * weight.shape[-1] >= MIN_WEIGHT
        and not torch.is_autocast_enabled("cpu")
    )


def matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b: (..., I), (O, I), (O,) -> (..., O), or (D, N, I), (D, O, I), (D, O) -> (D, N, O).

    Where `uses_onednn`, gradients must be disabled.
    """
    if uses_onednn(inputs, weight):
        assert not (torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad))
        if weight.dim() == 2:  # noqa: PLR2004
            return _onednn_product(inputs, weight, bias)
        biases = [None] * len(weight) if bias is None else bias.unbind(0)
        return torch.stack([_onednn_product(*operands) for operands in zip(inputs, weight, biases, strict=True)])
    if weight.dim() == 2:  # noqa: PLR2004
        return F.linear(inputs, weight, bias)
    return torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)


def input_gradient(grads: Tensor, weight: Tensor) -> Tensor:
    """Compute dL/dx of x W': (..., N, O), (..., O, I) -> (..., N, I)."""
    return matmul(grads, weight.mT) if uses_onednn(grads, weight) else grads @ weight


def weight_gradient(inputs: Tensor, grads: Tensor) -> Tensor:
    """Compute dL/dW of x W': (..., N, I), (..., N, O) -> (..., O, I)."""
    large = inputs.shape[-1] * grads.shape[-1] >= MIN_WEIGHT
    if large and uses_onednn(inputs, grads):  # oneDNN copies its first operand: make that the smaller one
        return matmul(inputs.mT, grads.mT).mT.contiguous()
    return grads.mT @ inputs


def gru_gates(gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:
    """Compute the pointwise part of a GRU's step: W x + b (..., 3H), U h + b' (..., 3H), h (..., H) ->
    h' = (1 - z) n + z h   (Cho et al. 2014), with r = sigmoid(.), z = sigmoid(.), n = tanh(. + r .): the reset gate
    after the product, as in cuDNN. One kernel on a GPU; on a CPU, the gradient by hand takes fewer operations than
    autograd's."""
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden: Tensor = torch.ops.aten._thnn_fused_gru_cell(*_rows(gates, recurrent, previous))[0]
        return hidden.view(previous.shape)
    if not torch.is_grad_enabled():
        return _next_state(gates, recurrent, previous)[0]
    hidden = _GRU.apply(gates, recurrent, previous)  # type: ignore[no-untyped-call]
    return hidden


def lstm_gates(gates: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the pointwise part of an LSTM's step: W x + b (..., 4H), U h + b' (..., 4H), c (..., H) ->
    h' = o tanh c' and c' = f c + i n   (Gers et al. 2000), with i, f and o = sigmoid(.), n = tanh(.), in the order
    i, f, n, o. On a CPU, a gradient by hand would gain nothing."""
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden, new = torch.ops.aten._thnn_fused_lstm_cell(*_rows(gates, recurrent, cell))[:2]
        return hidden.view(cell.shape), new.view(cell.shape)
    into, forget, new, output = (gates + recurrent).chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(output) * torch.tanh(cell), cell


class _Pending:
    """Inputs (..., N, I) and gradients (..., N, O) of the backward steps so far, partly reduced to their products."""

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
        """Reduce all stored steps by one product. Return the gradients so far."""
        if self.inputs:
            inputs, grads = _join(self.inputs), _join(self.grads)
            dtype = wide_dtype(grads.dtype)
            total = weight_gradient(inputs, grads), grads.sum(-2, dtype=dtype)
            if self.total is not None:
                total = self.total[0].to(dtype) + total[0], self.total[1] + total[1]
            self.inputs, self.grads, self.elements, self.total = [], [], 0, total
        assert self.total is not None
        return self.total


def _join(parts: list[Tensor]) -> Tensor:
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


def _onednn_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _onednn is not None
    outputs: Tensor = _onednn(_dense(inputs), _dense(weight), bias, "none", [], "")
    return outputs


def _dense(matrix: Tensor) -> Tensor:
    """Copy a slice of a matrix, on which oneDNN is a thousand times slower."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


def _rows(*operands: Tensor) -> Iterator[Tensor]:
    """Flatten operands (..., n) to (B, n) in the precision of the first, for the kernels of torch's own cells."""
    return (operand.to(operands[0].dtype).flatten(0, -2) for operand in operands)


def _next_state(gates: Tensor, recurrent: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    """Compute h', and what its gradient needs: r and z side by side, U_n h + b', n, h."""
    H = previous.shape[-1]
    reset_update = (gates[..., : 2 * H] + recurrent[..., : 2 * H]).sigmoid_()
    reset, update = reset_update.chunk(2, dim=-1)
    inner = recurrent[..., 2 * H :]
    new = torch.addcmul(gates[..., 2 * H :], reset, inner).tanh_()
    previous = previous.to(new.dtype)
    return torch.lerp(new, previous, update), reset_update, inner, new, previous


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:  # noqa: ANN401
        ctx.dtypes = gates.dtype, recurrent.dtype, previous.dtype
        hidden, *saved = _next_state(gates, recurrent, previous)
        ctx.save_for_backward(*saved)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        reset_update, inner, new, previous = ctx.saved_tensors
        reset, update = reset_update.chunk(2, dim=-1)
        previous_grad = grad * update
        new_grad = _tanh_backward(grad - previous_grad, new)
        both = _sigmoid_backward(torch.cat([new_grad * inner, grad * (previous - new)], dim=-1), reset_update)
        gates, recurrent = (torch.cat([both, part], dim=-1) for part in (new_grad, new_grad * reset))
        return gates.to(ctx.dtypes[0]), recurrent.to(ctx.dtypes[1]), previous_grad.to(ctx.dtypes[2])
