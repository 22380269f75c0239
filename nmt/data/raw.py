"""The first pass over a corpus: reads the user's files, and writes the usable pairs to a temporary file of each split.

A training pair with a blank side is not usable. Worker processes handle chunks of pairs; the results come back in the
order of the corpus.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data.corpus import Pair, Source, Splits, TextChunk, locate
from nmt.data.text import is_blank
from nmt.system.processes import Workers

READ_IN_MAIN = 16  # chunks that the main process reads before it starts workers
MAX_EXAMPLES = 3  # most pairs that a warning names
# Name of a count -> (largest share of a held-out split that causes no warning, text of the warning).
OVERLAPS = {
    "sources_in_train": (0.1, "have a source that is also in train"),
    "pairs_in_train": (0.01, "are also in train"),
}
BLANK = {  # side -> text of the warning about held-out pairs that lack text on this side
    "sources": "have no source text; nothing is translated there",
    "references": "have no reference text; no translation of them can match",
}
SAMPLE_SEED = 1

Array = NDArray[Any]


class RawChunk(NamedTuple):
    """Consecutive pairs in the temporary file of a split. Each pair takes three lines: source, target, alignment."""

    path: Path
    start: int  # offset of the chunk in the file, in bytes
    size: int  # length of the chunk in bytes
    pairs: int  # number of pairs

    def columns(self) -> list[list[str]]:
        """Read the sources, the targets and the word alignments."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            lines = file.read(self.size).decode().split("\n")
        return [lines[column:-1:3] for column in range(3)]


@dataclass
class RawSplit:
    """The usable pairs of a split."""

    chunks: list[RawChunk] = field(default_factory=list)
    read: int = 0  # number of pairs read, usable or not
    # Side (as in BLANK) -> the numbers, from 1, of the held-out pairs that lack text on this side.
    blank: dict[str, list[int]] = field(default_factory=lambda: {side: [] for side in BLANK})
    # int64 (N, 2) for each chunk of a held-out split: hashes of the source and of the whole pair.
    hashes: list[Array] = field(default_factory=list)
    also_held_out: set[int] = field(default_factory=set)  # the hashes of train that a held-out split has, too

    def __len__(self) -> int:
        return sum(chunk.pairs for chunk in self.chunks)


def read_splits(splits: Splits, working: Path, lowercase: bool, workers: Workers) -> dict[str, RawSplit]:
    """Write the usable pairs of each split to SPLIT.raw in `working`. Raises UserError if a file cannot be read, or a
    split has no usable pair or no reference text."""
    raw = {name: RawSplit() for name in splits}
    for name in sorted(splits, key=lambda name: name == "train"):  # train last, as it looks for the others' hashes
        _read_split(name, splits[name], working / f"{name}.raw", lowercase, workers, raw)
    return raw


def _read_split(
    name: str, sources: list[Source], path: Path, lowercase: bool, workers: Workers, raw: dict[str, RawSplit]
) -> None:
    result, train = raw[name], name == "train"
    held_out = {value for split in raw.values() for part in split.hashes for value in part.ravel().tolist()}
    chunks = chain.from_iterable(source.chunks() for source in sources)
    bar = tqdm(desc=f"read {name}", unit=" pairs", disable=None, leave=False)
    with path.open("wb") as file, bar:
        for chunk in workers.map(partial(_read_chunk, train, lowercase), chunks, READ_IN_MAIN):
            for side, indices in chunk.blank.items():
                result.blank[side] += [len(result) + index + 1 for index in indices]
            result.chunks.append(RawChunk(path, file.tell(), len(chunk.raw), len(chunk.hashes)))
            result.read += chunk.read
            file.write(chunk.raw)
            if train:
                result.also_held_out |= held_out.intersection(chunk.hashes.ravel().tolist())
            else:
                result.hashes.append(chunk.hashes)
            bar.update(chunk.read)
    if not len(result):
        raise UserError(f"data: none of the {result.read} pairs read for {name} can be used (see data.{name})")
    if len(result.blank["references"]) == len(result):
        raise UserError(f"data.{name}: none of its {len(result)} pairs has a reference text, so nothing can be scored")


class _ReadChunk(NamedTuple):
    raw: bytes  # the usable pairs in the format of `RawChunk`
    read: int  # number of pairs read, usable or not
    hashes: Array  # int64 (N, 2): hashes of the source and of the whole pair, the same in all processes
    blank: dict[str, list[int]]  # side (as in BLANK) -> indices, among the usable pairs, of those that lack text


def _read_chunk(train: bool, lowercase: bool, chunk: TextChunk | list[Pair]) -> _ReadChunk:
    """Read a chunk, without training pairs that have a blank side. All held-out pairs are kept, to be scored."""
    pairs = list(chunk)
    usable = [pair for pair in pairs if not (train and (is_blank(pair.source) or is_blank(pair.target)))]
    texts = [text for pair in usable for text in (pair.source, f"{pair.source}\n{pair.target}")]
    if lowercase:
        texts = [text.lower() for text in texts]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return _ReadChunk(
        raw="".join(f"{pair.source}\n{pair.target}\n{pair.alignment}\n" for pair in usable).encode(),
        read=len(pairs),
        hashes=np.frombuffer(b"".join(digests), "<i8").reshape(-1, 2),
        blank={
            "sources": [index for index, pair in enumerate(usable) if is_blank(pair.source)],
            "references": [index for index, pair in enumerate(usable) if is_blank(pair.target)],
        },
    )


def compare_splits(raw: dict[str, RawSplit], splits: Splits) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Count the pairs of each held-out split that train has too, by the names in OVERLAPS (no counts for train).

    Returns the counts and the warnings for the corpus report, also about pairs that lack text on a side.
    """
    counts: dict[str, dict[str, int]] = {name: {} for name in splits}
    warnings = []

    def warn(name: str, numbers: list[int], text: str) -> None:
        examples = locate(splits[name], numbers[:MAX_EXAMPLES])
        warnings.append(f"{name}: {len(numbers)} of {len(raw[name])} pairs {text}, such as {examples}")

    for name, split in raw.items():
        if name == "train":
            continue
        for side, text in BLANK.items():
            if numbers := split.blank[side]:
                warn(name, numbers, text)
        for hashes, (kind, (max_share, text)) in zip(np.concatenate(split.hashes).T, OVERLAPS.items(), strict=True):
            in_train = raw["train"].also_held_out
            numbers = [number for number, value in enumerate(hashes.tolist(), 1) if value in in_train]
            counts[name][kind] = len(numbers)
            if len(numbers) > max_share * len(split):
                warn(name, numbers, text)
    return counts, warnings


def tokenizer_lines(train: RawSplit, tokenizer: schema.TokenizerConfig) -> list[Iterator[str]]:
    """Draw the lines that the tokenizers are trained on: at most `max_train_lines` for each tokenizer. If both
    languages share it, this limits the lines of both sides together. Returns the drawn sources and the drawn targets,
    read when they are needed, in the order of the corpus."""
    if isinstance(tokenizer, schema.FileTokenizer):
        return [iter(()), iter(())]
    rng, pairs = np.random.default_rng(SAMPLE_SEED), len(train)

    def draw(lines: int) -> Array:
        chosen = np.zeros(lines, bool)
        chosen[rng.choice(lines, min(lines, tokenizer.max_train_lines), replace=False, shuffle=False)] = True
        return chosen

    separate = isinstance(tokenizer, schema.SidesTokenizer)
    chosen = [draw(pairs), draw(pairs)] if separate else draw(2 * pairs).reshape(2, pairs)
    return [_read_lines(train.chunks, side, mask) for side, mask in enumerate(chosen)]


def _read_lines(chunks: list[RawChunk], side: int, mask: Array) -> Iterator[str]:
    start = 0
    for chunk in chunks:
        yield from compress(chunk.columns()[side], mask[start : start + chunk.pairs].tolist())
        start += chunk.pairs
