"""Measure where the time of an update goes: its operations by kind, beside the least time that the processor allows."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Matrix products, with the position of their first factor among the arguments.
PRODUCTS = {"linear": 0, "_linear_pointwise": 0, "mm": 0, "bmm": 0, "mv": 0, "dot": 0} | dict.fromkeys(
    ("addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_"), 1
)
COPIES = {
    *("copy_", "clone", "_to_copy", "cat", "stack", "fill_", "zero_", "zeros", "zeros_like", "new_zeros", "ones_like"),
    *("embedding", "embedding_dense_backward", "index", "index_select", "index_put", "gather", "scatter_add_"),
    *("select_backward", "slice_backward", "constant_pad_nd"),
}
EMPTY = {"empty", "new_empty", "empty_strided", "empty_like", "new_empty_strided"}
MATRIX, VIEWS, POINTWISE = "matrix products", "views and empty tensors", "elementwise and reductions"
KINDS = (MATRIX, POINTWISE, "copies and lookups", "optimizer", VIEWS)
COPIED = 2**28  # bytes of a tensor that is too large for any cache


class Cost(NamedTuple):
    """Totals of the operations of one kind. `flops` counts the floating point operations of matrix products, `moved`
    the bytes that all other operations read and write."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    moved: float = 0.0


class Operations(TorchDispatchMode):
    """Times each operation within the context on a CPU. (A GPU returns from an operation before it is done.)"""

    def __init__(self) -> None:
        super().__init__()
        self.costs = dict.fromkeys(KINDS, Cost())

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        kind = kind_of(func)
        flops = moved = 0.0
        if kind == MATRIX:
            factor = args[PRODUCTS[func.overloadpacket.__name__]]
            flops = 2.0 * result.numel() * factor.shape[-1]
        elif kind != VIEWS:
            moved = float(sum(size(x) for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)))
        old = self.costs[kind]
        self.costs[kind] = Cost(old.calls + 1, old.seconds + seconds, old.flops + flops, old.moved + moved)
        return result


def kind_of(func: Any) -> str:  # noqa: ANN401
    """Return the kind of an operation, one of KINDS."""
    name = func.overloadpacket.__name__
    if name in PRODUCTS:
        return MATRIX
    if func.is_view or name in EMPTY:
        return VIEWS
    if name.startswith(("_fused_adam", "_fused_sgd", "_foreach")):
        return "optimizer"
    return "copies and lookups" if name in COPIES else POINTWISE


def size(tensor: Tensor) -> int:
    """Count the bytes that a tensor takes in memory: an expanded tensor takes fewer than its shape suggests."""
    shown = tensor.numel() * tensor.element_size()
    return shown if tensor.is_mkldnn else min(shown, tensor.untyped_storage().nbytes())


def bandwidth(repeats: int = 4) -> float:
    """Measure the bytes per second that copying a large tensor reads and writes."""
    tensor = torch.zeros(COPIED // 4)
    copied = tensor.clone()
    began = time.perf_counter()
    for _ in range(repeats):
        copied.copy_(tensor)
    return 2 * COPIED * repeats / (time.perf_counter() - began)


def operations(update: Callable[[int], None], updates: int, product_rate: Callable[[], float]) -> list[dict[str, Any]]:
    """Time updates, each of them twice: once as a whole, and once by kind of operation.

    The bound is the time that the matrix products take at `product_rate()` (FLOP/s), and for other kinds the time to
    read their tensors from memory and to write them. Operations on tensors in a cache can be faster than the bound. The
    time outside operations is attributed to Python and autograd.
    """
    speed, whole, measured, rates = bandwidth(), 0.0, Operations(), []
    for step in range(updates):
        rates.append(product_rate())
        began = time.perf_counter()
        update(step)
        whole += time.perf_counter() - began
        with measured:
            update(step)
    rows = []
    for kind, cost in measured.costs.items():
        bound = cost.flops / median(rates) + cost.moved / speed
        rows.append({"kind": kind, "calls": cost.calls / updates, "seconds": cost.seconds, "bound": bound})
    rest = whole - sum(row["seconds"] for row in rows)
    rows.append({"kind": "Python and autograd", "calls": None, "seconds": rest, "bound": 0.0})
    return [
        {
            "kind": row["kind"],
            "calls": row["calls"],
            "milliseconds": 1000 * row["seconds"] / updates,
            "share": row["seconds"] / whole,
            "milliseconds_at_bound": 1000 * row["bound"] / updates,
        }
        for row in rows
    ]
