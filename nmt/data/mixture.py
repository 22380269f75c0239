"""Which pairs of several corpora an epoch has: small corpora are repeated, large ones are read in parts.

Shapes: K corpora, N pairs of all corpora together.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nmt.config.schema import data as schema

Array = NDArray[Any]


class Mixture:
    """An epoch has N pairs. The share of a corpus is proportional to (pairs x weight)^(1 / temperature), after
    Arivazhagan et al. 2019, "Massively multilingual neural machine translation in the wild".

    Each corpus is read from start to end in a new random order, again and again, and an epoch takes the next pairs of
    each: no pair is read a second time before all others of its corpus were read. An epoch depends only on its number
    and the seed.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], temperature: float, seed: int) -> None:
        self._sizes, self._seed = sizes, seed
        self._starts = np.cumsum([0, *sizes]).tolist()
        self.counts = shares(sizes, weights, temperature)  # pairs of each corpus in an epoch

    @classmethod
    def of(cls, data: schema.Data, sizes: Sequence[int], seed: int) -> Self | None:
        """None if every pair is read once in an epoch, as from one corpus."""
        if not isinstance(data, schema.MultilingualData):
            return None
        mixture = cls(sizes, [corpus.weight for corpus in data.corpora], data.temperature, seed)
        return None if mixture.counts == list(sizes) else mixture

    def epoch(self, epoch: int) -> Array:
        """int64 (N,), indices of pairs."""
        return np.concatenate([self._read(corpus, epoch) for corpus in range(len(self._sizes))])

    def _read(self, corpus: int, epoch: int) -> Array:
        size, count = self._sizes[corpus], self.counts[corpus]
        if not size or not count:
            return np.zeros(0, np.int64)
        first, last = epoch * count, (epoch + 1) * count
        parts = []
        for number in range(first // size, -(-last // size)):
            order = np.random.default_rng([self._seed, corpus, number]).permutation(size)
            parts.append(order[max(0, first - number * size) : last - number * size])
        indices: Array = self._starts[corpus] + np.concatenate(parts)
        return indices


def shares(sizes: Sequence[int], weights: Sequence[float], temperature: float) -> list[int]:
    """Pairs (K,), weights (K,) -> pairs of each corpus in an epoch (K,), whose sum is that of the sizes.

    However small its share, an epoch reads at least one pair of every corpus that has any.
    """
    logs = np.log(np.maximum(sizes, 1)) + np.log(weights)
    scaled = np.where(np.asarray(sizes) > 0, logs / temperature, -np.inf)
    exact = np.exp(scaled - scaled.max())
    exact *= sum(sizes) / exact.sum()
    counts = np.maximum(np.floor(exact), np.asarray(sizes) > 0)
    rest = sum(sizes) - int(counts.sum())
    largest = np.argsort(counts - exact, kind="stable")  # of the rests
    counts[largest[: max(0, rest)]] += 1
    counts[counts.argmax()] += min(0, rest)
    return [int(count) for count in counts]
