"""Reading a few rows of a large tensor many times, at a cost that does not depend on the large tensor.

Shapes: B batch, S source positions, D features, N rows read.
"""

from typing import Any

import torch
from torch import Tensor


class GradientPool:
    """Rows of a tensor (B, S, D), read again and again; their gradients meet in one buffer.

    Autograd alone would make and add a gradient as large as the whole tensor for each read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._rows = tensor.detach().flatten(0, 1)
        self._sums: list[Tensor] = []  # none or one (B * S, D)
        # Every read depends on the token, so that autograd comes to the tensor after all of them.
        self._token = _Source.apply(tensor, self._sums)  # type: ignore[no-untyped-call]

    def read(self, index: Tensor) -> Tensor:
        """int64 (N,) into the B * S rows -> (N, D)."""
        rows: Tensor = _Read.apply(self._token, self._rows, index, self._sums)  # type: ignore[no-untyped-call]
        return rows


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sums: list[Tensor]) -> Tensor:  # noqa: ANN401
        ctx.sums, ctx.shape, ctx.dtype = sums, tensor.shape, tensor.dtype
        return tensor.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.sums.pop().view(ctx.shape).to(ctx.dtype), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, index: Tensor, sums: list[Tensor]) -> Tensor:  # noqa: ANN401
        ctx.sums, ctx.shape = sums, rows.shape
        ctx.save_for_backward(index)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        if not ctx.sums:
            ctx.sums.append(torch.zeros(ctx.shape, dtype=wide, device=grad.device))
        ctx.sums[0].index_add_(0, index, grad.to(wide))
        return grad.new_zeros(1), None, None, None
