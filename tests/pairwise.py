"""Pairwise testing: a subset of many combinations in which every pair of choices of any combination occurs."""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def pairwise(cases: Sequence[T], choices: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Choose cases greedily until they have every pair of choices that any case has. Keeps their order."""
    pairs = [{frozenset(pair) for pair in itertools.combinations(set(choices(case)), 2)} for case in cases]
    uncovered = set().union(*pairs)
    chosen: set[int] = set()
    most = [(-len(own), index) for index, own in enumerate(pairs)]  # (-upper bound of new pairs, index)
    heapq.heapify(most)
    while uncovered:
        before, index = most[0]
        now = len(pairs[index] & uncovered)
        if now < -before:
            heapq.heapreplace(most, (-now, index))
            continue
        heapq.heappop(most)
        chosen.add(index)
        uncovered -= pairs[index]
    return [cases[index] for index in sorted(chosen)]


def slow_but_pairwise(cases: Sequence[T], choices: Callable[[T], Iterable[Hashable]]) -> list[Any]:
    """Return all cases as parameters; those outside the pairwise subset are marked as slow."""
    quick = list(map(id, pairwise(cases, choices)))
    return [pytest.param(case, marks=[] if id(case) in quick else [pytest.mark.slow]) for case in cases]
