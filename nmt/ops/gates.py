"""The pointwise part of a GRU's and an LSTM's step, one kernel on a GPU.

On a CPU, that of a GRU is differentiated by hand, in fewer operations than autograd needs. An LSTM gains nothing by it.

Shapes: ... batch, H hidden.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


def gru_gates(gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:
    """W x + b (..., 3H), U h + b' (..., 3H), h (..., H) -> h' = (1 - z) n + z h   (Cho et al. 2014), with
    r = sigmoid(.), z = sigmoid(.), n = tanh(. + r .): the reset gate after the product, as in cuDNN."""
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden: Tensor = torch.ops.aten._thnn_fused_gru_cell(*_rows(gates, recurrent, previous))[0]
        return hidden.view(previous.shape)
    if not torch.is_grad_enabled():
        return _next_state(gates, recurrent, previous)[0]
    hidden = _GRU.apply(gates, recurrent, previous)  # type: ignore[no-untyped-call]
    return hidden


def lstm_gates(gates: Tensor, recurrent: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """W x + b (..., 4H), U h + b' (..., 4H), c (..., H) -> h' = o tanh c' and c' = f c + i n   (Gers et al. 2000), with
    i, f and o = sigmoid(.), n = tanh(.), in the order i, f, n, o."""
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden, new = torch.ops.aten._thnn_fused_lstm_cell(*_rows(gates, recurrent, memory))[:2]
        return hidden.view(memory.shape), new.view(memory.shape)
    into, forget, new, output = (gates + recurrent).chunk(4, dim=-1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(output) * torch.tanh(memory), memory


def _rows(*operands: Tensor) -> Iterator[Tensor]:
    """(..., n) each -> (B, n) in the precision of the first, for the kernels of torch's own cells, which have others
    for the backward pass."""
    return (each.to(operands[0].dtype).flatten(0, -2) for each in operands)


def _next_state(gates: Tensor, recurrent: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    """h', and what its gradient needs: r and z side by side, U_n h + b', n, h."""
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
