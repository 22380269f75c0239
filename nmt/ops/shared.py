"""Tensors that many operations read, and whose gradient is made once, after all of them.

Autograd makes and adds a gradient of the tensor's size for every use: in a recurrent loop of T steps, T small products
and T sums for every weight. Here the uses leave what the gradient needs, and it is made in one go at the end.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Combine = Callable[[list[Any]], tuple[Tensor | None, ...]]
"""What the uses have left, in the order of the backward pass -> the gradient of each shared tensor."""


class Shared(NamedTuple):
    """Tensors without gradient in the precision of the computation, and what their uses need in its place."""

    values: tuple[Tensor | None, ...]
    anchor: Tensor  # (1,) an input of every use, so that autograd comes to the tensors after all of them
    pending: list[Any]  # what the uses leave in their backward pass; made for it, empty outside of it


_loop: ContextVar[dict[Any, tuple[list[Any], Shared]] | None] = ContextVar("loop", default=None)


@contextmanager
def loop() -> Iterator[None]:
    """While it is entered, `share` knows a tensor again. Loops within the loop belong to it."""
    if _loop.get() is not None:
        yield
        return
    reset = _loop.set({})
    try:
        yield
    finally:
        _loop.reset(reset)


def in_loop() -> bool:
    """Is there anything to be gained from sharing?"""
    return _loop.get() is not None and torch.is_grad_enabled()


def _in_autocast_dtypes(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else in_autocast_dtype(tensor) for tensor in tensors)


def defer_gradient(
    tensors: tuple[Tensor | None, ...],
    combine: Combine,
    convert: Callable[..., tuple[Tensor | None, ...]] = _in_autocast_dtypes,
) -> Shared:
    """The same for the same tensors and `combine` within a loop, otherwise new.

    `convert` makes the values of the tensors, once.
    """
    known = _loop.get()
    if known is None:
        return _share(tensors, combine, convert)
    key = (*map(id, tensors), combine)
    if key not in known:

        def forget(_: Any) -> None:  # noqa: ANN401
            known.pop(key, None)  # with a tensor goes its id, which another may get

        known[key] = (
            [weakref.ref(each, forget) for each in tensors if each is not None],
            _share(tensors, combine, convert),
        )
    return known[key][1]


def _share(
    tensors: tuple[Tensor | None, ...], combine: Combine, convert: Callable[..., tuple[Tensor | None, ...]]
) -> Shared:
    pending: list[Any] = []
    values = convert(*(None if tensor is None else tensor.detach() for tensor in tensors))
    return Shared(values, _Source.apply(combine, pending, *tensors), pending)  # type: ignore[no-untyped-call]


def in_autocast_dtype(tensor: Tensor) -> Tensor:
    """The tensor in the precision of matrix products."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, combine: Combine, pending: list[Any], *tensors: Tensor | None) -> Tensor:  # noqa: ANN401
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
        found = zip(gradients, ctx.dtypes, strict=True)
        return (
            None,
            None,
            *(None if dtype is None or gradient is None else gradient.to(dtype) for gradient, dtype in found),
        )
