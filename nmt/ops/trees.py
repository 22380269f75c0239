"""The tensors of nested tuples: a function of each, some rows of each, several tuples joined.

Shapes: N rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply a function to every tensor in nested tuples and NamedTuples, and keep other values."""
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    return _rebuilt(tree, [map_tensors(function, part) for part in tree]) if isinstance(tree, tuple) else tree


def select(tree: Tree, index: Tensor) -> Tree:
    """From every tensor in nested tuples and NamedTuples, take the rows `index`, int64 (N,), which may repeat. A tuple
    with a method `select` selects its rows by that method."""
    if isinstance(tree, Tensor):
        return tree.index_select(0, index)  # type: ignore[return-value]
    if hasattr(tree, "select"):
        return tree.select(index)  # type: ignore[no-any-return]
    return _rebuilt(tree, [select(part, index) for part in tree]) if isinstance(tree, tuple) else tree


def join(trees: Sequence[Tree], dim: int) -> Tree:
    """Concatenate the corresponding tensors of tuples or NamedTuples of the same form, and keep None."""
    if isinstance(trees[0], Tensor):
        return torch.cat(trees, dim=dim)  # type: ignore[arg-type, return-value]
    if not isinstance(trees[0], tuple):
        return trees[0]
    return _rebuilt(trees[0], [join(parts, dim) for parts in zip(*trees, strict=True)])


def _rebuilt(tree: Tree, parts: list[Any]) -> Tree:
    """Make a tuple or NamedTuple of the type of `tree` from new parts."""
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)  # type: ignore[call-arg]
