"""Rows of tensors: of all tensors of a state, a few rows many times at a cost that does not depend on the tensor's
size, and all rows in another order.

Shapes: B batch, S source positions, D features, N rows.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.precision import wide
from nmt.ops.shared import defer_gradient

Tree = TypeVar("Tree")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply a function to every tensor in nested tuples and NamedTuples; other values stay."""
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    return _map_parts(lambda part: map_tensors(function, part), tree)


def select(tree: Tree, index: Tensor) -> Tree:
    """Take the rows `index`, int64 (N,), which may repeat, of every tensor in nested tuples and NamedTuples. A tuple
    that selects in another way has a method `select`."""
    if isinstance(tree, Tensor):
        return tree.index_select(0, index)  # type: ignore[return-value]
    if hasattr(tree, "select"):
        return tree.select(index)  # type: ignore[no-any-return]
    return _map_parts(lambda part: select(part, index), tree)


def _map_parts(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if not isinstance(tree, tuple):
        return tree
    parts = [function(part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather rows: (B, S, D), int64 (N,) into the B S rows -> (N, D).

    Within a loop, all calls add their gradients to one buffer.
    """
    shared = defer_gradient((tensor,), _buffer, _as_is)
    read: Tensor = _Rows.apply(shared.anchor, shared.pending, index, *shared.values)  # type: ignore[no-untyped-call]
    return read


def _as_is(tensor: Tensor) -> tuple[Tensor]:
    return (tensor,)


def _buffer(pending: list[Any]) -> tuple[Tensor]:
    return (pending[0],)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: list[Any], index: Tensor, tensor: Tensor) -> Tensor:  # noqa: ANN401
        ctx.pending, ctx.shape = pending, tensor.shape
        ctx.save_for_backward(index)
        return tensor.flatten(0, 1).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        grad = wide(grad)
        if not ctx.pending:
            ctx.pending.append(torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device))
        ctx.pending[0].flatten(0, 1).index_add_(0, index, grad)
        return None, None, None, None


def swap_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Reorder all rows: (N, D), int64 (N,) -> (N, D). index[index[n]] = n, so the same index reorders the gradient."""
    swapped: Tensor = _Swap.apply(tensor, index)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(index)
        return tensor.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None
