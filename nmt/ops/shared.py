"""Tensors that many operations read, and whose gradient is made once, after all of them.

Autograd makes and adds a gradient of the tensor's size for every use: in a recurrent loop of T steps, T small products
and T sums for every weight. Here the uses leave what the gradient needs, and it is made in one go at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

Combine = Callable[[list[Any]], tuple[Tensor | None, ...]]
"""What the uses have left, in the order of the backward pass -> the gradient of each shared tensor."""


class Shared(NamedTuple):
    """Tensors without gradient in the precision of the computation, and what their uses need in its place."""

    values: tuple[Tensor | None, ...]
    token: Tensor  # (1,) an input of every use, so that autograd comes to the tensors after all of them
    gathered: list[Any]  # what the uses leave in their backward pass; made for it, empty outside of it


_loop: ContextVar[dict[Any, tuple[Any, Shared]] | None] = ContextVar("loop", default=None)


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


def _as_computed(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else computed(tensor) for tensor in tensors)


def share(
    tensors: tuple[Tensor | None, ...],
    combine: Combine,
    convert: Callable[..., tuple[Tensor | None, ...]] = _as_computed,
) -> Shared:
    """The same for the same first tensor and `combine` within a loop, otherwise new.

    `convert` makes the values of the tensors, once.
    """
    known = _loop.get()
    if known is None:
        return _share(tensors, combine, convert)
    key = id(tensors[0]), combine
    if key not in known:
        known[key] = tensors, _share(tensors, combine, convert)  # held, so that no other tensor gets its id
    return known[key][1]


def _share(
    tensors: tuple[Tensor | None, ...], combine: Combine, convert: Callable[..., tuple[Tensor | None, ...]]
) -> Shared:
    gathered: list[Any] = []
    values = convert(*(None if tensor is None else tensor.detach() for tensor in tensors))
    return Shared(values, _Source.apply(combine, gathered, *tensors), gathered)  # type: ignore[no-untyped-call]


def computed(tensor: Tensor) -> Tensor:
    """The tensor in the precision of matrix products."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, combine: Combine, gathered: list[Any], *tensors: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.combine, ctx.gathered = combine, gathered
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        first = tensors[0]
        assert first is not None
        return first.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradients = ctx.combine(ctx.gathered)
        ctx.gathered.clear()
        found = zip(gradients, ctx.dtypes, strict=True)
        return None, None, *(None if gradient is None else gradient.to(dtype) for gradient, dtype in found)
