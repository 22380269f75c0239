"""Batches with little padding, in an order that depends on seed and epoch only.

Shapes: B batch, S source positions, T target positions, N sentence pairs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.data.prepared import Side, Split, padded
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.metrics.alignment import parse_pharaoh, words_of_pieces

Indices = NDArray[Any]  # int64


class Batch(NamedTuple):
    """Sentence pairs, padded."""

    indices: Indices  # (B,) in the corpus
    source: Tensor  # int64 (B, S), </s> last
    lengths: Tensor  # int64 (B,) of the sources, on the CPU
    target_in: Tensor  # int64 (B, T) = <s> y_1 ... y_{T-1}
    target_out: Tensor  # int64 (B, T) = y_1 ... y_{T-1} </s>
    target_tokens: int  # without padding
    alignment: Tensor | None = None  # float32 (B, T, S), the attention asked for, where training is guided by it

    def to(self, device: torch.device) -> Self:
        """The batch on a device. Lengths stay on the CPU, where packing needs them, in memory that can be copied
        without waiting."""
        if device.type == "cpu":
            return self
        pins = device.type == "cuda"

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if pins else tensor.to(device)

        return self._replace(
            source=moved(self.source),
            lengths=self.lengths.pin_memory() if pins else self.lengths,
            target_in=moved(self.target_in),
            target_out=moved(self.target_out),
            alignment=None if self.alignment is None else moved(self.alignment),
        )


def plan(
    source_lengths: Indices,
    target_lengths: Indices,
    *,
    batch_tokens: int,
    batch_sentences: int | None,
    rng: np.random.Generator,
    drawn: tuple[Indices, Indices] | None = None,
) -> list[Indices]:
    """Lengths (N,) -> index arrays that cover every pair once; pairs of like length share a batch.

    A batch holds as many pairs as fit: pairs x longest side <= batch_tokens, at least one pair. Which of the pairs
    of one length meet, and the order of the batches, are drawn from `rng`. With `drawn` lengths, pairs that are alike
    in these meet, in batches of the same sizes: the number of batches stays.
    """
    shuffled = rng.permutation(len(source_lengths))
    order = _by_length(shuffled, source_lengths, target_lengths)
    longest = np.maximum(source_lengths, target_lengths)[order]
    most = min(batch_tokens, batch_sentences or batch_tokens)
    batches: list[slice] = []
    start = 0
    while start < len(order):
        window = longest[start : start + most]
        padded_size = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        size = max(1, int(np.searchsorted(padded_size, batch_tokens, side="right")))
        batches.append(slice(start, start + size))
        start += size
    if drawn is not None:
        order = _by_length(shuffled, *drawn)
    return [order[batches[i]] for i in rng.permutation(len(batches))]


def _by_length(indices: Indices, source_lengths: Indices, target_lengths: Indices) -> Indices:
    """Sorted by target, then source."""
    return indices[np.lexsort((source_lengths[indices], target_lengths[indices]))]


class Batches:
    """The batches of a split, epoch by epoch."""

    def __init__(
        self,
        split: Split,
        tokenizers: Tokenizers,
        *,
        batch_tokens: int,
        batch_sentences: int | None,
        seed: int,
        sampling: tuple[float, float] = (0.0, 0.0),
        guided: bool = False,
    ) -> None:
        """sampling > 0 draws a new segmentation of every sentence in every epoch (BPE-dropout, Kudo 2018), for source
        and target; guided: batches have the corpus's word alignments."""
        self.split, self.tokenizers = split, tokenizers
        self.batch_tokens, self.batch_sentences = batch_tokens, batch_sentences
        self.seed, self.sampling, self.guided = seed, sampling, guided
        self._lengths = split.source.lengths, split.target.lengths

    def epoch(self, epoch: int) -> list[Indices]:
        """The plan of an epoch: the same for the same seed and number."""
        rng = np.random.default_rng([self.seed, epoch])
        return plan(
            *self._lengths,
            batch_tokens=self.batch_tokens,
            batch_sentences=self.batch_sentences,
            rng=rng,
            drawn=self._drawn_lengths(epoch) if any(self.sampling) else None,
        )

    def load(self, indices: Indices, epoch: int, parts: int = 1) -> list[Batch]:
        """The pairs `indices` as one batch, or as up to so many smaller ones."""
        source, target = (
            self._sample(lines, tokenizer, sampling, indices, epoch)
            if sampling
            else [lines.ids(int(i)) for i in indices]
            for lines, tokenizer, sampling in self._sides()
        )
        return [
            self._batch([source[i] for i in part], [target[i] for i in part], indices[part])
            for part in np.array_split(np.arange(len(indices)), parts)
            if len(part)
        ]

    def padded_size(self, indices: Indices) -> int:
        """Tokens of these pairs as one batch, with padding, on its longer side; as they were prepared, not drawn."""
        return len(indices) * max(int(lengths[indices].max()) for lengths in self._lengths)

    def _batch(self, source: list[Any], target: list[Any], indices: Indices) -> Batch:
        batch = collate(source, target, self.tokenizers, indices)
        if not self.guided:
            return batch
        assert self.split.alignments is not None
        pieces = []
        for side, (text, tokenizer, sampling) in zip((source, target), self._sides(), strict=True):
            lines = [text.line(int(i)) for i in indices]
            if sampling:
                drawn = map(tokenizer.pieces, side)
                pieces.append([tokenizer.with_spaces_of(*each) for each in zip(lines, drawn, strict=True)])
            else:
                pieces.append(tokenizer.surfaces(lines))  # unknown words as they are written
        return batch._replace(alignment=attention_of([self.split.alignments[int(i)] for i in indices], *pieces))

    def _drawn_lengths(self, epoch: int) -> tuple[Indices, Indices]:
        """(N,) of source and target in this epoch. They are drawn again to be loaded: all ids of an epoch would take as
        much memory as the corpus has text."""
        source, target = (
            np.concatenate([[len(ids) for ids in self._sample(*side, part, epoch)] for part in self._parts()])
            if side.sampling
            else lengths
            for side, lengths in zip(self._sides(), self._lengths, strict=True)
        )
        return source, target

    def _parts(self) -> list[Indices]:
        """All indices, some thousands at a time."""
        return np.array_split(np.arange(len(self.split)), -(-len(self.split) // 10_000))

    def _sides(self) -> list["_Side"]:
        sides = (self.split.source, self.split.target)
        return [_Side(*each) for each in zip(sides, self.tokenizers, self.sampling, strict=True)]

    def _sample(self, lines: Side, tokenizer: Tokenizer, sampling: float, indices: Indices, epoch: int) -> list[Any]:
        first = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        seeds = [(first + int(i)) % 2**32 for i in indices]
        return [np.asarray(ids) for ids in tokenizer.sample([lines.line(int(i)) for i in indices], sampling, seeds)]


class _Side(NamedTuple):
    lines: Side
    tokenizer: Tokenizer
    sampling: float


def collate(source: list[Any], target: list[Any], tokenizers: Tokenizers, indices: Indices) -> Batch:
    """Token ids, each sentence ending in </s> -> Batch."""
    target_out = torch.from_numpy(padded(target, tokenizers.target.pad))
    first = torch.full((len(target), 1), tokenizers.target.bos)
    return Batch(
        indices=indices,
        source=torch.from_numpy(padded(source, tokenizers.source.pad)),
        lengths=torch.tensor([len(sentence) for sentence in source]),
        target_in=torch.cat([first, target_out[:, :-1]], dim=1),
        target_out=target_out,
        target_tokens=sum(map(len, target)),
    )


def attention_of(alignments: Sequence[str], source: Sequence[Sequence[str]], target: Sequence[Sequence[str]]) -> Tensor:
    """Pharaoh lines and pieces, </s> last -> float32 (B, T, S).

    A row is spread evenly over the pieces of all source words linked to its word, surely or possibly, and zero where
    there are none; </s> is linked to </s>.
    """
    shape = len(source), max(map(len, target)), max(map(len, source))
    wanted = np.zeros(shape, dtype=np.float32)
    for row, line, source_pieces, target_pieces in zip(wanted, alignments, source, target, strict=True):
        source_words, target_words = words_of_pieces(source_pieces), words_of_pieces(target_pieces)
        links = np.zeros((target_words[-1] + 1, source_words[-1] + 1), dtype=np.float32)
        _, possible = parse_pharaoh(line)
        for i, j in possible:
            if j < target_words[-1] and i < source_words[-1]:  # the tokenizer may have joined words
                links[j, i] = 1.0
        links[-1, -1] = 1.0
        row[: len(target_pieces), : len(source_pieces)] = links[np.ix_(target_words, source_words)]
    return torch.from_numpy(wanted / np.maximum(wanted.sum(-1, keepdims=True), 1.0))
