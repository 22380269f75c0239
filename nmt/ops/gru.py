"""The pointwise part of a GRU's step, with its gradient by hand: a third of the kernels autograd would run.

Shapes: ... batch, H hidden.
"""

from typing import Any

import torch
from torch import Tensor

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


def gru_gates(gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:
    """W x + b (..., 3H), U h + b' (..., 3H), h (..., H) -> h' = (1 - z) n + z h   (Cho et al. 2014), with
    r = sigmoid(.), z = sigmoid(.), n = tanh(. + r .): the reset gate after the product, as in cuDNN."""
    hidden: Tensor = _GRU.apply(gates, recurrent, previous)  # type: ignore[no-untyped-call]
    return hidden


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:  # noqa: ANN401
        H = previous.shape[-1]
        ctx.dtypes = gates.dtype, recurrent.dtype, previous.dtype
        reset_update = (gates[..., : 2 * H] + recurrent[..., : 2 * H]).sigmoid_()
        reset, update = reset_update.chunk(2, dim=-1)
        inner = recurrent[..., 2 * H :]
        new = torch.addcmul(gates[..., 2 * H :], reset, inner).tanh_()
        previous = previous.to(new.dtype)
        ctx.save_for_backward(reset_update, inner, new, previous)
        return torch.lerp(new, previous, update)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        reset_update, inner, new, previous = ctx.saved_tensors
        reset, update = reset_update.chunk(2, dim=-1)
        H = new.shape[-1]
        gates = new.new_empty(*new.shape[:-1], 3 * H)
        of_reset, of_update, of_new = gates.split(H, dim=-1)
        kept = grad * update
        _tanh_backward(grad - kept, new, grad_input=of_new)
        torch.mul(of_new, inner, out=of_reset)
        torch.mul(grad, previous - new, out=of_update)
        both = gates[..., : 2 * H]
        _sigmoid_backward(both, reset_update, grad_input=both)
        recurrent = torch.cat([both, of_new * reset], dim=-1)
        return gates.to(ctx.dtypes[0]), recurrent.to(ctx.dtypes[1]), kept.to(ctx.dtypes[2])
