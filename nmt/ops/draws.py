"""Random numbers: the seed of an update, dropout, and draws that belong to sentences.

A sentence gets the same draws, however its batch is divided among processes and micro-batches. A counter-based
generator (Salmon et al. 2011) hashes the sentence's key and a counter by SplitMix64 (Steele et al. 2014).

Shapes: B sentences, N rows.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

MASK_BITS = 16  # random bits per element of a dropout mask, with which a probability is exact to 2^-17
# The constants of SplitMix64, as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FRACTION_BITS = 53  # random bits of a number, as many as the significand of a float64 has
BLOCK = 64  # numbers of a sentence computed at a time, so that most steps of a decoder find them computed already
_SAMPLING = 2**32  # the first counter for sampled translations; smaller counters are for other draws


def seed_draws(seed: int, step: int, rank: int) -> None:
    """Seed torch's global generators for an update, so that its random numbers do not depend on earlier updates. rank:
    number of the process, whose random numbers differ from those of others."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014) with a mask that is cheap on a CPU."""

    def forward(self, inputs: Tensor) -> Tensor:
        return dropout(inputs, self.p, self.training)


def dropout(inputs: Tensor, p: float, training: bool) -> Tensor:
    """Set elements to zero with probability p, and divide the others by 1 - p. Uses torch's global generator. On a CPU,
    torch's own dropout draws one random number per element and is ten times slower."""
    if not training or p == 0:
        return inputs
    if p == 1 or inputs.device.type != "cpu":
        return F.dropout(inputs, p)
    words = torch.empty(-(-inputs.numel() // 4), dtype=torch.int64).random_(-(2**63), None)  # one for four elements
    bits = words.view(torch.int16)[: inputs.numel()].view(inputs.shape)
    # A share p of all int16 numbers lies below this limit. The minimum avoids overflow for p near 1.
    limit = min(round(p * (1 << MASK_BITS)), (1 << MASK_BITS) - 1) - (1 << MASK_BITS - 1)
    kept = bits >= limit
    dropped: Tensor = inputs * kept.to(inputs.dtype).mul_(1 / (1 - p))
    return dropped


class SentenceDraws:
    """Draws uniform numbers for the sentences of a batch."""

    def __init__(self, make_keys: Callable[[], Tensor]) -> None:
        """make_keys: returns the key of each sentence, int64 (B,). It is called once, at the first draw."""
        self.keys, self.counter = cache(make_keys), 0
        self._block, self._start = torch.empty(0, 0), 0  # numbers computed in advance, and the counter of the first

    def __call__(self, rows: int, count: int, device: torch.device) -> Tensor:
        """Draw numbers (rows, count) in [0, 1). rows: the number of sentences or a multiple of it; then the rows of a
        sentence follow each other and get different numbers."""
        first, self.counter = self.counter, self.counter + count
        if len(self._block) != rows or self.counter > self._start + self._block.shape[1]:
            keys = self.keys()
            keys = _keys_of_copies(keys.to(device, non_blocking=True), rows // len(keys))
            self._start = first
            self._block = _uniform(keys[:, None], torch.arange(first, first + max(count, BLOCK), device=device))
        return self._block[:, first - self._start : self.counter - self._start]


_current: SentenceDraws | None = None


@contextmanager
def sentence_draws(draws: SentenceDraws | None) -> Iterator[None]:
    """Enter a context in which `draw` draws from `draws`, or from torch's global generator if it is None."""
    global _current  # noqa: PLW0603
    before, _current = _current, draws
    try:
        yield
    finally:
        _current = before


def copied_draws(sentences: Tensor, copies: Tensor) -> AbstractContextManager[None]:
    """Enter a context in which `draw` draws for copies of the current sentences: row n is copy number `copies[n]` of
    sentence `sentences[n]`, both int64 (N,) on the CPU."""
    current = _current
    if current is None:
        return nullcontext()
    return sentence_draws(SentenceDraws(lambda: _hash(current.keys()[sentences] + 1 + copies)))


def draw(rows: int, count: int, device: torch.device) -> Tensor:
    """Draw numbers (rows, count) in [0, 1): from the `sentence_draws` of the context, or if there are none, from
    torch's global generator."""
    return torch.rand(rows, count, device=device) if _current is None else _current(rows, count, device)


def sentence_keys(seed: Sequence[int], numbers: NDArray[Any]) -> Tensor:
    """Make the keys of sentences from a seed and a number for each sentence, such as its line number in a corpus:
    (B,) -> int64 (B,) on the CPU."""
    start = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])
    return _hash(torch.from_numpy(numbers.astype(np.int64)) + (start << 31))


def sampling_draws(keys: Tensor, samples: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Make a function that draws a number in [0, 1) for each of the given rows: int64 (N,) -> (N,), new at each call.
    keys: int64 (B,). A row is a sample of a sentence: sentence i has rows i * samples to (i + 1) * samples - 1."""
    rows, counters = _keys_of_copies(keys.to(device, non_blocking=True), samples), itertools.count(_SAMPLING)
    return lambda numbers: _uniform(rows[numbers], next(counters))


def _keys_of_copies(keys: Tensor, copies: int) -> Tensor:
    """Make a key for each copy of a sentence: int64 (B,) -> (B * copies,). The copies of a sentence follow each other.
    A single copy keeps the key of its sentence."""
    if copies == 1:
        return keys
    return _hash(keys[:, None] + 1 + torch.arange(copies, device=keys.device)).flatten()


def _uniform(keys: Tensor, counters: Tensor | int) -> Tensor:
    """Hash int64 keys and counters, of shapes that broadcast, to float64 in [0, 1); float32 on MPS, which lacks
    float64."""
    # The product of a tensor wraps around at 64 bits. That of a Python int must fit into an int64 before it is added.
    increments = counters * _INCREMENT if isinstance(counters, Tensor) else counters * _INCREMENT % 2**63
    bits = _shifted(_hash(keys + increments), 64 - _FRACTION_BITS)
    return bits.to(torch.float32 if bits.device.type == "mps" else torch.float64) * 2.0**-_FRACTION_BITS


def _hash(numbers: Tensor) -> Tensor:
    """Apply the output function of SplitMix64 to each number. Its products overflow and wrap around."""
    mixed = numbers
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * multiplier
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift signed numbers to the right and fill with zeros, not with the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
