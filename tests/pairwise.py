"""A part of many combinations that a quick suite runs: every pair of choices that any combination has occurs in it."""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def pairwise(cases: Sequence[T], choices: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Greedily, cases with every pair of choices that any case has, in their order."""
    pairs = [{frozenset(pair) for pair in itertools.combinations(set(choices(case)), 2)} for case in cases]
    uncovered = set().union(*pairs)
    chosen: set[int] = set()
    most = [(-len(own), index) for index, own in enumerate(pairs)]  # no case covers more than it once did
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
    """All cases, those outside the pairwise ones marked as slow."""
    quick = list(map(id, pairwise(cases, choices)))
    return [pytest.param(case, marks=[] if id(case) in quick else [pytest.mark.slow]) for case in cases]
