"""The pointwise part of a GRU step, differentiated by hand in fewer operations than autograd needs.

Shapes: ... batch, H hidden.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        reset_update, inner, new, previous = ctx.saved_tensors
        reset, update = reset_update.chunk(2, dim=-1)
        previous_grad = grad * update
        new_grad = _tanh_backward(grad - previous_grad, new)
        both = _sigmoid_backward(torch.cat([new_grad * inner, grad * (previous - new)], dim=-1), reset_update)
        gates, recurrent = (torch.cat([both, part], dim=-1) for part in (new_grad, new_grad * reset))
        return gates.to(ctx.dtypes[0]), recurrent.to(ctx.dtypes[1]), previous_grad.to(ctx.dtypes[2])
