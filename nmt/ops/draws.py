"""Random numbers that belong to sentences: they do not depend on which processes and micro-batches share a batch.

A counter-based generator (Salmon et al. 2011) hashes the sentence's key and a counter by SplitMix64 (Steele et al.
2014). Shapes: B sentences, N rows.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # as a signed number, like the multipliers
_MULTIPLIERS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FRACTION_BITS = 53  # of a float64
BLOCK = 64  # numbers of a sentence computed at a time, so that not every step of a decoder needs these operations
_SAMPLING = 2**32  # the first counter for sampled translations; smaller ones are for other draws


class SentenceDraws:
    """Uniform numbers for the sentences of a batch."""

    def __init__(self, make_keys: Callable[[], Tensor]) -> None:
        """make_keys: returns a key for each sentence, int64 (B,); called at the first draw."""
        self.make_keys, self.counter = make_keys, 0
        self._block, self._start = torch.empty(0, 0), 0  # computed in advance, and the first counter in it

    @cached_property
    def keys(self) -> Tensor:
        """Make the key of each sentence, int64 (B,), once."""
        return self.make_keys()

    def __call__(self, rows: int, count: int, device: torch.device) -> Tensor:
        """Draw (rows, count) in [0, 1). rows: the number of sentences or a multiple of it, with the rows of a sentence
        together."""
        first, self.counter = self.counter, self.counter + count
        if len(self._block) != rows or self.counter > self._start + self._block.shape[1]:
            keys = _copies(self.keys.to(device, non_blocking=True), rows // len(self.keys))
            self._start = first
            self._block = _uniform(keys[:, None], torch.arange(first, first + max(count, BLOCK), device=device))
        return self._block[:, first - self._start : self.counter - self._start]


_current: SentenceDraws | None = None


@contextmanager
def sentence_draws(draws: SentenceDraws | None) -> Iterator[None]:
    """Enter a context in which `draw` uses these numbers; None for torch's generator."""
    global _current  # noqa: PLW0603
    before, _current = _current, draws
    try:
        yield
    finally:
        _current = before


def copied_draws(sentences: Tensor, copies: Tensor) -> AbstractContextManager[None]:
    """Enter a context in which `draw` is for copies of the current sentences: row n is copy number `copies[n]` of
    sentence `sentences[n]`, both int64 (N,) on the CPU."""
    current = _current
    if current is None:
        return nullcontext()
    return sentence_draws(SentenceDraws(lambda: _hash(current.keys[sentences] + 1 + copies)))


def draw(rows: int, count: int, device: torch.device) -> Tensor:
    """Draw (rows, count) in [0, 1): of the current sentences, or from torch's global generator if there are none."""
    return torch.rand(rows, count, device=device) if _current is None else _current(rows, count, device)


def sentence_keys(seed: Sequence[int], numbers: NDArray[Any]) -> Tensor:
    """Make keys from the sentences' numbers, such as their line in a corpus: (B,) -> int64 (B,) on the CPU."""
    start = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
    return _hash(torch.from_numpy(numbers.astype(np.int64)) + (start << 31))


def sampling_draws(keys: Tensor, samples: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Draws for samples of each sentence: keys int64 (B,) -> a function from rows int64 (N,) to numbers (N,) in [0, 1),
    others at each call. Sentence i has the rows from i * samples to (i + 1) * samples - 1."""
    rows, counters = _copies(keys.to(device, non_blocking=True), samples), itertools.count(_SAMPLING)
    return lambda numbers: _uniform(rows[numbers], next(counters))


def _copies(keys: Tensor, copies: int) -> Tensor:
    """Make a key for each copy of a sentence: int64 (B,) -> (B * copies,), copies of a sentence together; one copy has
    the sentence's own key."""
    if copies == 1:
        return keys
    return _hash(keys[:, None] + 1 + torch.arange(copies, device=keys.device)).flatten()


def _uniform(keys: Tensor, counters: Tensor | int) -> Tensor:
    """Hash int64 keys and counters, of shapes that broadcast, to float64 in [0, 1); float32 on MPS, which lacks
    float64."""
    increments = counters * _INCREMENT if isinstance(counters, Tensor) else counters * _INCREMENT % 2**63
    bits = _shifted(_hash(keys + increments), 64 - _FRACTION_BITS)
    return bits.to(torch.float32 if bits.device.type == "mps" else torch.float64) * 2.0**-_FRACTION_BITS


def _hash(numbers: Tensor) -> Tensor:
    """Apply SplitMix64's output function; products wrap around."""
    mixed = numbers
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * multiplier
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
