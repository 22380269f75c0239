"""The two passes over the splits of a corpus.

`read_corpus` reads the user's files, drops training pairs with a blank side, writes the usable pairs to temporary files
(SPLIT.raw) and trains the tokenizers on them. `encode_split` encodes the pairs of such a file, drops training pairs by
length, and writes the files that `prepared.Split` reads. Worker processes handle chunks of pairs; the results come back
in the order of the corpus.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data.corpus import Pair, Source, Splits, TextChunk, locate
from nmt.data.prepared import IDS, OFFSETS
from nmt.data.text import is_blank
from nmt.data.tokenizer import Tokenizers, make_tokenizers
from nmt.system.processes import Workers

log = logging.getLogger(__name__)

READ_IN_MAIN, ENCODE_IN_MAIN = 16, 4  # chunks that the main process handles before it starts workers
MAX_HELD_OUT = 5_000  # most tokens of a held-out sentence: the attention weights of its batch must fit in memory
MAX_EXAMPLES = 3  # most pairs that a warning names
OVERLAPS = {  # name of a count -> (largest share of a held-out split that causes no warning, text of the warning)
    "sources_in_train": (0.1, "have a source that is also in train"),
    "pairs_in_train": (0.01, "are also in train"),
}
BLANK = {  # side -> text of the warning about held-out pairs that lack text on this side
    "sources": "have no source text; nothing is translated there",
    "references": "have no reference text; no translation of them can match",
}
SAMPLE_SEED = 1
SIDES = ("source", "target")

Array = NDArray[Any]
Report = dict[str, Any]


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

    def __len__(self) -> int:
        return sum(chunk.pairs for chunk in self.chunks)


# The first pass


def read_corpus(
    data: schema.Data, tokenizer: schema.TokenizerConfig, splits: Splits, working: Path, workers: Workers
) -> tuple[dict[str, RawSplit], dict[str, dict[str, int]], list[str]]:
    """Read the splits, train the tokenizers and write them to `working`. Raises UserError.

    Returns the usable pairs of each split, the counts of each split by the names in OVERLAPS (no counts for train),
    and warnings for the corpus report.
    """
    overlap = Overlap()
    raw = {
        name: _read_split(name, splits[name], working / f"{name}.raw", tokenizer.lowercase, workers, overlap)
        for name in sorted(splits, key=lambda name: name == "train")  # train last, as `Overlap` needs
    }
    log.info("tokenizer: %s", tokenizer.kind)
    source_lines, target_lines = tokenizer_lines(raw["train"], tokenizer)
    make_tokenizers(tokenizer, source_lines, target_lines, data.tags).save(working)
    counts: dict[str, dict[str, int]] = {name: {} for name in splits}
    warnings = []

    def warn(name: str, numbers: list[int], text: str) -> None:
        examples = locate(splits[name], numbers[:MAX_EXAMPLES])
        warnings.append(f"{name}: {len(numbers)} of {len(raw[name])} pairs {text}, such as {examples}")

    for name in overlap.held_out:
        for side, text in BLANK.items():
            if numbers := raw[name].blank[side]:
                warn(name, numbers, text)
        for column, (kind, (max_share, text)) in enumerate(OVERLAPS.items()):
            numbers = overlap.numbers(name, column)
            counts[name][kind] = len(numbers)
            if len(numbers) > max_share * len(raw[name]):
                warn(name, numbers, text)
    return raw, counts, warnings


def _read_split(
    name: str, sources: list[Source], path: Path, lowercase: bool, workers: Workers, overlap: "Overlap"
) -> RawSplit:
    """Write the usable pairs of a split to `path`. Raises UserError if a file cannot be read, no pair is
    usable, or no pair has a reference text."""
    result = RawSplit()
    chunks = chain.from_iterable(source.chunks() for source in sources)
    bar = tqdm(desc=f"read {name}", unit=" pairs", disable=None, leave=False)
    with path.open("wb") as file, bar:
        for chunk in workers.map(partial(_read_chunk, name == "train", lowercase), chunks, READ_IN_MAIN):
            for side, indices in chunk.blank.items():
                result.blank[side] += [len(result) + index + 1 for index in indices]
            result.chunks.append(RawChunk(path, file.tell(), len(chunk.raw), len(chunk.hashes)))
            result.read += chunk.read
            file.write(chunk.raw)
            overlap.add(name, chunk.hashes)
            bar.update(chunk.read)
    if not len(result):
        raise UserError(f"data: none of the {result.read} pairs read for {name} can be used (see data.{name})")
    if len(result.blank["references"]) == len(result):
        raise UserError(f"data.{name}: none of its {len(result)} pairs has a reference text, so nothing can be scored")
    return result


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
    digests = [_digest(text.lower() if lowercase else text) for text in texts]
    return _ReadChunk(
        raw="".join(f"{pair.source}\n{pair.target}\n{pair.alignment}\n" for pair in usable).encode(),
        read=len(pairs),
        hashes=np.frombuffer(b"".join(digests), "<i8").reshape(-1, 2),
        blank={
            "sources": [index for index, pair in enumerate(usable) if is_blank(pair.source)],
            "references": [index for index, pair in enumerate(usable) if is_blank(pair.target)],
        },
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class Overlap:
    """Finds, by hashes, the held-out sources and pairs that are also in train. Train must be added last."""

    def __init__(self) -> None:
        self.held_out: dict[str, list[Array]] = {}  # split -> hashes (N, 2) of each of its chunks
        self._wanted: set[int] | None = None  # the hashes of all held-out splits
        self._in_train: set[int] = set()

    def add(self, name: str, hashes: Array) -> None:
        """Add the hashes, int64 (N, 2), of the next N pairs of a split."""
        if name != "train":
            self.held_out.setdefault(name, []).append(hashes)
            return
        if self._wanted is None:
            self._wanted = {
                value for split in self.held_out.values() for part in split for value in part.ravel().tolist()
            }
        self._in_train |= self._wanted.intersection(hashes.ravel().tolist())

    def numbers(self, name: str, column: int) -> list[int]:
        """Return the numbers, from 1, of the held-out pairs whose source (column 0) or whole pair (1) is in train."""
        hashes = np.concatenate(self.held_out[name])[:, column].tolist()
        return [number for number, value in enumerate(hashes, 1) if value in self._in_train]


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


# The second pass


def encode_split(
    name: str, raw: RawSplit, sources: list[Source], working: Path, lowercase: bool, data: schema.Data, workers: Workers
) -> Report:
    """Encode the usable pairs of a split with the tokenizers in `working`, and write the files of the split there.

    Returns the split's part of the corpus report. Raises UserError for a held-out sentence that is too long.
    """
    encoder = Encoder(working, lowercase, (data.max_length, data.max_ratio) if name == "train" else None)
    dropped, kept, has_links = Counter(empty=raw.read - len(raw)), 0, False
    bar = tqdm(desc=f"encode {name}", total=len(raw), unit=" pairs", disable=None, leave=False)
    with ExitStack() as stack, bar:
        sides = [SideWriter(working, f"{name}.{side}", stack) for side in SIDES]
        alignments = stack.enter_context((working / f"{name}.alignments").open("wb"))
        for chunk in workers.map(encoder, raw.chunks, ENCODE_IN_MAIN):
            if chunk.too_long is not None:
                index, tokens = chunk.too_long
                raise UserError(
                    f"{locate(sources, [kept + index + 1])}: has {tokens} tokens, more than the {MAX_HELD_OUT} allowed "
                    "in a held-out sentence; shorten the pair or remove it"
                )
            for writer, side in zip(sides, chunk.sides, strict=True):
                writer.append(side)
            alignments.write("".join(f"{line}\n" for line in chunk.alignments).encode())
            has_links |= any(chunk.alignments)
            dropped.update(chunk.dropped)
            kept += len(chunk.alignments)
            bar.update(len(chunk.alignments) + sum(chunk.dropped.values()))
    if not has_links:
        (working / f"{name}.alignments").unlink()
    return {
        "read": raw.read,
        "kept": kept,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "tokens": [side.tokens for side in sides],
        "longest": [side.longest for side in sides],
        "unknown_rate": [side.unknown / max(1, side.tokens) for side in sides],
    }


class EncodedSide(NamedTuple):
    """N encoded sentences of one language."""

    ids: Array  # concatenated token ids of all sentences; each sentence ends with </s>
    lengths: Array  # (N,) number of tokens of each sentence
    text: bytes  # concatenated UTF-8 text of all sentences
    sizes: Array  # (N,) number of bytes of each sentence
    unknown: int  # number of unknown tokens


class EncodedChunk(NamedTuple):
    """The pairs of a chunk that are kept, and the number of dropped pairs by reason."""

    sides: list[EncodedSide]
    alignments: list[str]
    dropped: dict[str, int]
    too_long: tuple[int, int] | None  # first held-out pair that is too long: (its index, tokens of its longer side)


class Encoder:
    """Encodes chunks of usable pairs. Each process loads the tokenizers at its first chunk."""

    def __init__(self, directory: Path, lowercase: bool, limits: tuple[int, float | None] | None) -> None:
        """`limits` holds max_length and max_ratio for training pairs; it is None for a held-out split."""
        self._directory, self._lowercase, self._limits = directory, lowercase, limits

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        *columns, links = chunk.columns()
        tokenizers = _tokenizers(self._directory, self._lowercase)
        ids = [
            tokenizer.encode(["" if is_blank(line) else line for line in lines])
            for tokenizer, lines in zip(tokenizers, columns, strict=True)
        ]
        lengths = np.array([[len(sentence) for sentence in side] for side in ids], np.int32)
        keep, dropped, too_long = np.ones(len(links), bool), dict[str, int](), None
        longest = lengths.max(axis=0, initial=0)
        if self._limits is not None:
            keep, dropped = _filter(lengths, *self._limits)
        elif longest.max(initial=0) > MAX_HELD_OUT:
            index = int(np.argmax(longest > MAX_HELD_OUT))
            too_long = index, int(longest[index])
        sides = []
        for tokenizer, lines, sentences, sizes in zip(tokenizers, columns, ids, lengths, strict=True):
            tokens = np.fromiter(chain.from_iterable(compress(sentences, keep)), IDS)
            texts = [line.encode() for line in compress(lines, keep)]
            text_sizes = np.fromiter(map(len, texts), np.int32, len(texts))
            unknown = int((tokens == tokenizer.unk).sum())
            sides.append(EncodedSide(tokens, sizes[keep], b"".join(texts), text_sizes, unknown))
        return EncodedChunk(sides, list(compress(links, keep)), dropped, too_long)


def _filter(lengths: Array, max_length: int, max_ratio: float | None) -> tuple[Array, dict[str, int]]:
    """Choose the training pairs to keep, and count the dropped pairs by reason. `lengths` (2, N) include </s>."""
    shortest, longest = lengths.min(axis=0), lengths.max(axis=0)
    reasons = {
        "empty": shortest == 1,  # a side has only </s>: the tokenizer removed, for example, a zero-width space
        "too_long": longest > max_length,
        "ratio": longest > (np.inf if max_ratio is None else max_ratio) * shortest,
    }
    keep = np.ones(lengths.shape[1], bool)
    dropped = {}
    for reason, mask in reasons.items():
        dropped[reason] = int((keep & mask).sum())
        keep &= ~mask
    return keep, dropped


@lru_cache(1)
def _tokenizers(directory: Path, lowercase: bool) -> Tokenizers:
    return Tokenizers.load(directory, lowercase)


class SideWriter:
    """Writes the files of a `prepared.Side`, which grow chunk by chunk."""

    def __init__(self, directory: Path, name: str, stack: ExitStack) -> None:
        self._ids, self._text = (
            stack.enter_context((directory / f"{name}.{kind}").open("wb")) for kind in ("ids", "txt")
        )
        self._offsets, self._lines = (
            stack.enter_context(OffsetsWriter(directory / f"{name}.{kind}.npy")) for kind in ("offsets", "lines")
        )
        self.tokens = self.longest = self.unknown = 0

    def append(self, side: EncodedSide) -> None:
        """Write the next sentences."""
        self._ids.write(side.ids.tobytes())
        self._text.write(side.text)
        self._offsets.append(side.lengths)
        self._lines.append(side.sizes)
        self.tokens += len(side.ids)
        self.longest = max(self.longest, int(side.lengths.max(initial=0)))
        self.unknown += side.unknown


class OffsetsWriter:
    """Writes an .npy file of offsets (N + 1,): the start of each of N sentences, and the end of the last sentence."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._count = self._end = 0
        self._write_header()
        self._file.write(np.zeros(1, OFFSETS).tobytes())

    def __enter__(self) -> "OffsetsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()

    def append(self, lengths: Array) -> None:
        """Write the ends of the next sentences, which have these lengths."""
        ends = self._end + np.cumsum(lengths, dtype=OFFSETS)
        self._file.write(ends.tobytes())
        self._count += len(ends)
        self._end = int(ends[-1]) if len(ends) else self._end

    def _write_header(self) -> None:
        """Write NumPy's header at the current position. It has the same size for any number of sentences."""
        header = {"descr": OFFSETS.str, "fortran_order": False, "shape": (self._count + 1,)}
        np.lib.format.write_array_header_1_0(self._file, header)
