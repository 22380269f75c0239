"""Batches of padded sentence pairs, in an order that depends only on seed and epoch.

Pairs of similar length share a batch. Planning an epoch takes about 50 bytes of memory for each pair of the corpus.

Shapes: B batch, S source positions, T target positions, N sentence pairs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.prepared_corpus import PreparedCorpus, Side, Split
from nmt.data.tokenizer import Tokenizer, Tokenizers
from nmt.data.word_alignment import parse_pharaoh, words_of_pieces

SAMPLED = 10_000  # number of sentences that `_Side.sampled_lengths` segments at a time

Indices = NDArray[Any]  # integers: indices of pairs, or lengths in tokens
Ids = Sequence[int] | NDArray[Any]  # token ids of a sentence, with </s> at the end


class Batch(NamedTuple):
    """Padded sentence pairs, as token ids."""

    indices: Indices  # (B,) indices of the pairs in their split
    source: Tensor  # int64 (B, S): source tokens x_1 ... </s>, then padding
    # int64 (B,): number of tokens of each source, counting </s>. On the CPU unless the batch is for a CUDA graph.
    lengths: Tensor
    target_in: Tensor  # int64 (B, T): inputs of the decoder, <s> y_1 ... y_{T-1}
    target_out: Tensor  # int64 (B, T): tokens that the decoder must predict, y_1 ... y_{T-1} </s>
    target_tokens: int  # number of target tokens in the batch, with </s> and without padding
    alignment: Tensor | None = None  # float32 (B, T, S): gold attention weights, for guided alignment

    def to(self, device: torch.device) -> Self:
        """Move the batch to a device. `lengths` stays on the CPU, where packed sequences need it; for CUDA, it is in
        pinned memory."""
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


def padded(sentences: Sequence[Ids], pad: int) -> NDArray[Any]:
    """Pad the token ids of B sentences with `pad` to the length of the longest -> int64 (B, longest)."""
    lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
    filled = np.full((len(sentences), int(lengths.max(initial=0))), pad, dtype=np.int64)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = np.concatenate(sentences) if lengths.sum() else []
    return filled


def collate(source: Sequence[Ids], target: Sequence[Ids], tokenizers: Tokenizers, indices: Indices) -> Batch:
    """Pad the token ids of sentence pairs and shift the targets for teacher forcing."""
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


def gold_attention(
    alignments: Sequence[str], source: Sequence[Sequence[str]], target: Sequence[Sequence[str]]
) -> Tensor:
    """Convert B Pharaoh lines, given the pieces of both sides, to gold attention weights: float32 (B, T, S).

    The pieces of each sentence end with </s>. The weights of a target piece are uniform over the pieces of all source
    words that its word is linked to (sure or possible), and zero if its word has no link. The target's </s> is linked
    to the source's </s>.
    """
    shape = len(source), max(map(len, target)), max(map(len, source))
    weights = np.zeros(shape, dtype=np.float32)
    for of_pair, line, source_pieces, target_pieces in zip(weights, alignments, source, target, strict=True):
        source_words, target_words = words_of_pieces(source_pieces), words_of_pieces(target_pieces)
        links = np.zeros((target_words[-1] + 1, source_words[-1] + 1), dtype=np.float32)
        _, possible = parse_pharaoh(line)
        for i, j in possible:
            # If the tokenizer joined words, the pieces form fewer words than the line has: skip links beyond them.
            if j < target_words[-1] and i < source_words[-1]:
                links[j, i] = 1.0
        links[-1, -1] = 1.0
        of_pair[: len(target_pieces), : len(source_pieces)] = links[np.ix_(target_words, source_words)]
    return torch.from_numpy(weights / np.maximum(weights.sum(-1, keepdims=True), 1.0))


def plan(
    source_lengths: Indices,
    target_lengths: Indices,
    *,
    batch_tokens: int,
    batch_sentences: int | None,
    rng: np.random.Generator,
    sampled_lengths: tuple[Indices, Indices] | None = None,
) -> list[Indices]:
    """Group N pairs, given by the lengths (N,) of their sides, into batches of indices. Each pair is in one batch.

    A batch has at most `batch_sentences` pairs. The number of pairs x the length of the longest side is at most
    `batch_tokens`, unless a single longer pair forms the batch. `rng` shuffles pairs of equal length and the
    order of the batches.

    `sampled_lengths` are the lengths of sampled segmentations. They decide which pairs share a batch, but not how many
    pairs a batch has. So all epochs have the same number of batches, but a batch may exceed `batch_tokens`.
    """
    shuffled = rng.permutation(len(source_lengths))
    order = _by_length(shuffled, source_lengths, target_lengths)
    longest = np.maximum(source_lengths, target_lengths)[order]
    ends = _batch_ends(longest, batch_tokens, batch_sentences)
    if sampled_lengths is not None:
        order = _by_length(shuffled, *sampled_lengths)
    batches = np.split(order, ends[:-1])
    return [batches[i] for i in rng.permutation(len(ends))]


def _batch_ends(longest: Indices, batch_tokens: int, batch_sentences: int | None) -> list[int]:
    """Return the index after the last pair of each batch. `longest` (N,) is the length of each pair's longer side."""
    max_pairs = min(batch_tokens, batch_sentences or batch_tokens)
    ends: list[int] = []
    end = 0
    while end < len(longest):
        window = longest[end : end + max_pairs]
        padded_size = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        end += max(1, int(np.searchsorted(padded_size, batch_tokens, side="right")))
        ends.append(end)
    return ends


def _by_length(indices: Indices, source_lengths: Indices, target_lengths: Indices) -> Indices:
    """Sort the indices of pairs by target length, then by source length."""
    return indices[np.lexsort((source_lengths[indices], target_lengths[indices]))]


class _Side(NamedTuple):
    """The sentences of one language of a split. With alpha > 0, each epoch samples new segmentations."""

    lines: Side
    tokenizer: Tokenizer
    alpha: float
    # Seed of the run, and 0 for source or 1 for target: with equal seeds, both sides would draw the same numbers.
    seeds: tuple[int, int]

    def ids(self, indices: Indices, epoch: int) -> list[NDArray[Any]]:
        """Return the token ids of the sentences `indices`, segmented as in this epoch."""
        if not self.alpha:
            return [self.lines.ids(int(i)) for i in indices]
        first = int(np.random.SeedSequence([*self.seeds, epoch]).generate_state(1)[0])
        seeds = [(first + int(i)) % 2**32 for i in indices]
        return [np.asarray(ids) for ids in self.tokenizer.sample(self._text(indices), self.alpha, seeds)]

    def pieces(self, indices: Indices, ids: Sequence[Ids]) -> list[list[str]]:
        """Return the pieces of the sentences `indices` with token ids `ids`. Unknown pieces stay as in the text."""
        lines = self._text(indices)
        if not self.alpha:
            return self.tokenizer.surfaces(lines)
        return [self.tokenizer.surfaces_of(line, sentence) for line, sentence in zip(lines, ids, strict=True)]

    def sampled_lengths(self, epoch: int) -> Indices:
        """Return the number of tokens of each sentence in this epoch -> (N,). Sampled segmentations are not stored,
        because they would take as much memory as the text: `ids` samples them again from the same seeds."""
        if not self.alpha:
            return self.lines.lengths
        parts = np.split(np.arange(len(self.lines)), range(SAMPLED, len(self.lines), SAMPLED))
        return np.concatenate([[len(ids) for ids in self.ids(part, epoch)] for part in parts])

    def _text(self, indices: Indices) -> list[str]:
        return [self.lines.line(int(i)) for i in indices]


class Batches:
    """Plans the batches of a split for each epoch, and loads them."""

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
        """`sampling` holds the probabilities of source and target that BPE-dropout (Provilkov et al. 2020) skips a
        merge. With `guided`, batches contain the gold attention weights."""
        self.split, self.tokenizers = split, tokenizers
        self.sampling, self.guided = sampling, guided
        self._batch_tokens, self._batch_sentences, self._seed = batch_tokens, batch_sentences, seed
        self._source = _Side(split.source, tokenizers.source, sampling[0], (seed, 0))
        self._target = _Side(split.target, tokenizers.target, sampling[1], (seed, 1))

    def epoch(self, epoch: int) -> list[Indices]:
        """Plan the batches of an epoch, each as the indices of its pairs. The plan depends only on seed and epoch.

        With sampled segmentations, their lengths decide which pairs share a batch.
        """
        sampled = (
            (self._source.sampled_lengths(epoch), self._target.sampled_lengths(epoch)) if any(self.sampling) else None
        )
        return plan(
            self.split.source.lengths,
            self.split.target.lengths,
            batch_tokens=self._batch_tokens,
            batch_sentences=self._batch_sentences,
            rng=np.random.default_rng([self._seed, epoch]),
            sampled_lengths=sampled,
        )

    def load(self, indices: Indices, epoch: int, parts: int = 1) -> list[Batch]:
        """Load the pairs `indices` as one batch, or as up to `parts` smaller batches."""
        source, target = self._source.ids(indices, epoch), self._target.ids(indices, epoch)
        return [
            self._batch([source[i] for i in part], [target[i] for i in part], indices[part])
            for part in np.array_split(np.arange(len(indices)), parts)
            if len(part)
        ]

    def target_tokens(self, indices: Indices, epoch: int) -> int:
        """Count the target tokens of the pairs `indices` in an epoch."""
        if self.sampling[1]:
            return sum(map(len, self._target.ids(indices, epoch)))
        return int(self.split.target.lengths_of(indices).sum())

    def padded_size(self, indices: Indices) -> int:
        """Return the number of pairs x the length of their longest side, as segmented without sampling."""
        return len(indices) * max(
            int(side.lengths_of(indices).max()) for side in (self.split.source, self.split.target)
        )

    def _batch(self, source: list[NDArray[Any]], target: list[NDArray[Any]], indices: Indices) -> Batch:
        """Pad the token ids of the pairs `indices`, and add the gold attention weights if the batches are guided."""
        batch = collate(source, target, self.tokenizers, indices)
        if not self.guided:
            return batch
        assert self.split.alignments is not None
        alignments = [self.split.alignments[int(i)] for i in indices]
        pieces = self._source.pieces(indices, source), self._target.pieces(indices, target)
        return batch._replace(alignment=gold_attention(alignments, *pieces))


def make_batches(
    corpus: PreparedCorpus,
    split: str,
    config: TrainConfig,
    sampling: tuple[float, float] = (0.0, 0.0),
) -> Batches:
    """Make the batches of a split as the section `training` configures them.

    With guided alignment, the batches of "train" contain gold attention weights. Raises UserError if guided
    alignment is configured but the training pairs have no word alignments.
    """
    guided = split == "train" and config.training.guided_alignment > 0
    if guided and corpus.splits[split].alignments is None:
        raise UserError("training.guided_alignment: the training corpus has no word alignments (data.alignments)")
    return Batches(
        corpus.splits[split],
        corpus.tokenizers,
        batch_tokens=config.training.batch_tokens,
        batch_sentences=config.training.batch_sentences,
        seed=config.seed,
        sampling=sampling,
        guided=guided,
    )
