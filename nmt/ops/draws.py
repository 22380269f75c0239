"""Random numbers: dropout with a cheap mask, and numbers that belong to sentences.

On a CPU, torch's own dropout draws one random number per element and is ten times slower. Numbers of sentences do not
depend on which processes and micro-batches share a batch: a counter-based generator (Salmon et al. 2011) hashes the
sentence's key and a counter by SplitMix64 (Steele et al. 2014). Shapes: B sentences, N rows, T positions, D features.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

_MASK_BITS = 16  # random bits per element: probabilities are exact to 2^-17
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # as a signed number, like the multipliers
_MULTIPLIERS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FRACTION_BITS = 53  # of a float64
BLOCK = 64  # numbers of a sentence computed at a time, so that not every step of a decoder needs these operations
_SAMPLING = 2**32  # the first counter for sampled translations; smaller ones are for other draws


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014); variational: all positions of a sentence share one mask (Gal and Ghahramani
    2016)."""

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__(p)
        self.variational = variational

    def forward(self, inputs: Tensor) -> Tensor:
        """Any shape -> the same shape; if variational, (B, T, D), or (B, D) with one vector per sentence."""
        shares = self.variational and inputs.dim() == 3  # noqa: PLR2004
        return dropout(inputs, self.p, self.training, along=1 if shares else None)

    def sentence_mask(self, like: Tensor, *shape: int) -> Tensor | None:
        """Draw the variational mask (B, D), for callers that process positions one by one; None if each position has
        its own."""
        return mask(like, shape, self.p, self.training and self.variational)


def dropout(inputs: Tensor, p: float, training: bool, along: int | None = None) -> Tensor:
    """Set elements to zero with probability p, and divide the others by 1 - p. Uses torch's global generator.

    along: the dimension that shares one mask, such as the positions of a sentence.
    """
    if not training or p == 0:
        return inputs
    if along is not None:
        return inputs * dropout(torch.ones_like(inputs.select(along, 0)), p, training).unsqueeze(along)
    if p == 1 or inputs.device.type != "cpu":
        return F.dropout(inputs, p)
    kept = _random_bits(inputs) >= _limit(p)
    dropped: Tensor = inputs * kept.to(inputs.dtype).mul_(1 / (1 - p))
    return dropped


def mask(like: Tensor, shape: tuple[int, ...], p: float, training: bool) -> Tensor | None:
    """Draw a dropout mask of this shape and the type of `like`, for repeated use; None if nothing is dropped."""
    return dropout(like.new_ones(shape), p, training) if training and p else None


def masked(inputs: Tensor, mask: Tensor | None) -> Tensor:
    """Multiply (B, T, D) or (B, D) by a mask (B, D), if there is one -> the shape of the inputs."""
    if mask is None:
        return inputs
    return inputs * (mask[:, None] if inputs.dim() > mask.dim() else mask)


def zoneout(new: Tensor, before: Tensor, p: float, training: bool) -> Tensor:
    """Keep the previous value of each element with probability p; in evaluation, take the expectation   (Krueger et al.
    2017)."""
    before = before.to(new.dtype)
    if not training:
        return torch.lerp(new, before, p)
    if p == 1:
        return before
    previous = _random_bits(new) < _limit(p) if new.device.type == "cpu" else torch.rand_like(new) < p
    return torch.where(previous, before, new)


def _random_bits(like: Tensor) -> Tensor:
    """Draw uniform int16 numbers: each 64-bit random number serves four elements."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[: like.numel()].view(like.shape)


def _limit(p: float) -> int:
    """The int16 threshold below which a share p < 1 of all values lies. The minimum avoids overflow for p near 1."""
    return min(round(p * (1 << _MASK_BITS)), (1 << _MASK_BITS) - 1) - (1 << _MASK_BITS - 1)


class SentenceDraws:
    """Uniform numbers for the sentences of a batch."""

    def __init__(self, make_keys: Callable[[], Tensor]) -> None:
        """make_keys: returns a key for each sentence, int64 (B,); called at the first draw."""
        self.make_keys, self.counter = make_keys, 0
        self._block, self._start = torch.empty(0, 0), 0  # computed in advance, and the first counter in it

    @cached_property
    def keys(self) -> Tensor:
        """The key of each sentence, int64 (B,)."""
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
