"""The batches of an epoch, in an order that depends only on seed and epoch.

Pairs of similar length share a batch. A large corpus is divided into blocks, which are planned one at a time: that
takes about 50 bytes for each pair of a block.

Shapes: N sentence pairs.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from nmt.data.prepared import Side

BLOCK = 2**22  # pairs planned at a time
RUN = 2**10  # consecutive pairs of the corpus that belong to the same block

Indices = NDArray[Any]  # int64
SampledLengths = Callable[[Indices], tuple[Indices, Indices]]


def plan(
    source_lengths: Indices,
    target_lengths: Indices,
    *,
    batch_tokens: int,
    batch_sentences: int | None,
    rng: np.random.Generator,
    sampled_lengths: tuple[Indices, Indices] | None = None,
) -> list[Indices]:
    """Lengths (N,) -> batches of indices that cover every pair once; pairs of similar length share a batch.

    A batch holds as many pairs as fit, at least one: pairs x longest side <= batch_tokens. `rng` shuffles pairs of
    equal length and the order of batches. `sampled_lengths`, those of sampled segmentations, replace the lengths for
    grouping, but the batch sizes stay, so that the number of batches does not change.
    """
    shuffled = rng.permutation(len(source_lengths))
    order = _by_length(shuffled, source_lengths, target_lengths)
    longest = np.maximum(source_lengths, target_lengths)[order]
    ends = _batch_ends(longest, batch_tokens, batch_sentences)
    if sampled_lengths is not None:
        order = _by_length(shuffled, *sampled_lengths)
    starts = [0, *ends]
    return [order[starts[i] : ends[i]] for i in rng.permutation(len(ends))]


def _batch_ends(longest: Indices, batch_tokens: int, batch_sentences: int | None) -> list[int]:
    """Longest sides of pairs in their order (N,) -> where each batch ends."""
    max_pairs = min(batch_tokens, batch_sentences or batch_tokens)
    ends = []
    start = 0
    while start < len(longest):
        window = longest[start : start + max_pairs]
        padded_size = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        start += max(1, int(np.searchsorted(padded_size, batch_tokens, side="right")))
        ends.append(min(start, len(longest)))
    return ends


def _by_length(indices: Indices, source_lengths: Indices, target_lengths: Indices) -> Indices:
    """Sorted by target length, then source length."""
    return indices[np.lexsort((source_lengths[indices], target_lengths[indices]))]


class Blocks:
    """Divides a split into blocks of about equal size, each of random runs of the corpus, and plans their batches.

    The blocks of a seed are the same in every epoch, and so is the number of batches.
    """

    def __init__(self, source: Side, target: Side, batch_tokens: int, batch_sentences: int | None, seed: int) -> None:
        self._source, self._target = source, target
        self._batch_tokens, self._batch_sentences, self._seed = batch_tokens, batch_sentences, seed
        self._count = -(-len(source) // BLOCK)
        self._sizes: list[int] = []  # batches of each block

    def epoch(self, epoch: int, sampled_lengths: SampledLengths | None) -> Sequence[Indices]:
        """The batches of an epoch. sampled_lengths: lengths of both sides of pairs, if segmentations are sampled."""
        if self._count == 1:
            return self._plan(0, np.random.default_rng([self._seed, epoch]), sampled_lengths)[1]
        if not self._sizes:
            self._sizes = [self._size(block) for block in range(self._count)]
        order = np.random.default_rng([self._seed, epoch]).permutation(self._count).tolist()

        def plan_block(position: int) -> tuple[Indices, list[Indices]]:
            rng = np.random.default_rng([self._seed, epoch, order[position]])
            return self._plan(order[position], rng, sampled_lengths)

        return Plan([self._sizes[block] for block in order], plan_block)

    def _runs(self, block: int) -> list[tuple[int, int]]:
        """The ranges of pairs that belong to a block, in ascending order."""
        N = len(self._source)
        if self._count == 1:
            return [(0, N)]
        shuffled = np.random.default_rng(self._seed).permutation(-(-N // RUN))
        runs = np.sort(np.array_split(shuffled, self._count)[block]).tolist()
        return [(run * RUN, min((run + 1) * RUN, N)) for run in runs]

    def _size(self, block: int) -> int:
        """The number of batches of a block."""
        runs = self._runs(block)
        source, target = self._source.lengths_in(runs), self._target.lengths_in(runs)
        base = int(source.max()) + 1
        ordered = np.sort(target.astype(np.int64) * base + source)
        longest = np.maximum(ordered // base, ordered % base)
        return len(_batch_ends(longest, self._batch_tokens, self._batch_sentences))

    def _plan(
        self, block: int, rng: np.random.Generator, sampled_lengths: SampledLengths | None
    ) -> tuple[Indices, list[Indices]]:
        """The pairs of a block, and its batches as indices of these."""
        runs = self._runs(block)
        members = np.concatenate([np.arange(start, end) for start, end in runs])
        batches = plan(
            self._source.lengths_in(runs),
            self._target.lengths_in(runs),
            batch_tokens=self._batch_tokens,
            batch_sentences=self._batch_sentences,
            rng=rng,
            sampled_lengths=sampled_lengths and sampled_lengths(members),
        )
        return members, batches


class Plan(Sequence[Indices]):
    """The batches of an epoch, block by block. A block is planned when one of its batches is read."""

    def __init__(self, sizes: Sequence[int], plan_block: Callable[[int], tuple[Indices, list[Indices]]]) -> None:
        """sizes: batches of each block."""
        self._starts = [0, *np.cumsum(sizes).tolist()]
        self._plan_block = plan_block
        self._planned: tuple[int, Indices, list[Indices]] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, position: int) -> Indices: ...

    @overload
    def __getitem__(self, position: slice) -> list[Indices]: ...

    def __getitem__(self, position: int | slice) -> Indices | list[Indices]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not -len(self) <= position < len(self):
            raise IndexError(position)
        position %= len(self)
        block = bisect(self._starts, position) - 1
        if self._planned is None or self._planned[0] != block:
            self._planned = None  # frees its memory first
            self._planned = block, *self._plan_block(block)
        _, members, batches = self._planned
        indices: Indices = members[batches[position - self._starts[block]]]
        return indices
