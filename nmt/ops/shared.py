"""Deferred gradients: a tensor that a loop reads at every step gets its gradient once, after all steps.

Autograd would compute and add a gradient of the tensor's size for every use: in a recurrent loop of T steps, T small
products and T sums for every weight. Here each use stores what the gradient needs (`Shared.pending`), and one function
(`CombineGradients`) computes the gradient from all of that. It runs last, because every use has the `anchor` as an
input, whose backward pass autograd can only reach after all uses.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.precision import in_autocast_dtype

CombineGradients = Callable[[list[Any]], tuple[Tensor | None, ...]]
"""What the uses stored, in the order of the backward pass -> the gradient of each shared tensor."""


class Shared(NamedTuple):
    """Detached tensors in the precision of the computation, and what the uses need to defer the gradient."""

    values: tuple[Tensor | None, ...]
    anchor: Tensor  # (1,) an input of every use, so that autograd reaches the tensors after all uses
    pending: list[Any]  # what the uses store during the backward pass; empty outside it


_loop: ContextVar[dict[Any, tuple[list[Any], Shared]] | None] = ContextVar("loop", default=None)


@contextmanager
def loop() -> Iterator[None]:
    """Enter a context in which `defer_gradient` recognises a tensor it has seen. A nested loop belongs to the outer
    one."""
    if _loop.get() is not None:
        yield
        return
    shared: dict[Any, tuple[list[Any], Shared]] = {}
    reset = _loop.set(shared)
    try:
        yield
    finally:
        _loop.reset(reset)
        shared.clear()  # the callbacks of its references refer to it: a cycle would keep tensors alive


def in_loop() -> bool:
    """Check if gradients are deferred."""
    return torch.is_grad_enabled() and _loop.get() is not None


def _in_autocast_dtypes(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else in_autocast_dtype(tensor) for tensor in tensors)


def defer_gradient(
    tensors: tuple[Tensor | None, ...],
    combine: CombineGradients,
    convert: Callable[..., tuple[Tensor | None, ...]] = _in_autocast_dtypes,
) -> Shared:
    """Share tensors among their uses: within a loop, the same tensors and `combine` always give the same Shared.

    convert: computes once, from the tensors, the values that the uses read.
    """
    shared = _loop.get()
    if shared is None:
        return _share(tensors, combine, convert)
    key = (*map(id, tensors), combine)
    if key not in shared:

        def remove(_: Any) -> None:  # noqa: ANN401
            shared.pop(key, None)  # a new tensor may get the id of a deleted one

        shared[key] = (
            [weakref.ref(tensor, remove) for tensor in tensors if tensor is not None],
            _share(tensors, combine, convert),
        )
    return shared[key][1]


def _share(
    tensors: tuple[Tensor | None, ...], combine: CombineGradients, convert: Callable[..., tuple[Tensor | None, ...]]
) -> Shared:
    pending: list[Any] = []
    values = convert(*(None if tensor is None else tensor.detach() for tensor in tensors))
    return Shared(values, _Source.apply(combine, pending, *tensors), pending)  # type: ignore[no-untyped-call]


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, combine: CombineGradients, pending: list[Any], *tensors: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.combine, ctx.pending = combine, pending
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        first = tensors[0]
        assert first is not None
        return first.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradients = ctx.combine(ctx.pending)
        ctx.pending.clear()
        typed = zip(gradients, ctx.dtypes, strict=True)
        return (
            None,
            None,
            *(None if dtype is None or gradient is None else gradient.to(dtype) for gradient, dtype in typed),
        )
