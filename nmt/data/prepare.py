"""Prepares a corpus once: reads and filters it, trains the tokenizers, encodes it, and keeps the result in a cache.

All files are written to a working folder, CACHE/.FINGERPRINT.part, which is renamed to CACHE/FINGERPRINT when it is
complete. A preparation that was killed starts from the beginning.

`read_splits` reads the user's files, drops training pairs with a blank side, and writes the rest to a temporary file of
each split. `encode_split` encodes these pairs, drops training pairs by length, and writes the files of
`PreparedCorpus`. Worker processes handle chunks of pairs; results come back in the order of the corpus.
"""

import fcntl
import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nmt.config.errors import UserError, user_path
from nmt.config.schema import data as schema
from nmt.data import corpus
from nmt.data.corpus import Pair, Source, Splits, TextChunk, locate
from nmt.data.prepared_corpus import FORMAT, IDS, Array, PreparedCorpus, Sentences, SideWriter
from nmt.data.text import is_blank
from nmt.data.tokenizer import Tokenizers, check_sampling, make_tokenizers
from nmt.system.files import named_errors, try_lock, write_atomically
from nmt.system.processes import Workers

THREADS = 4  # threads that hash files
READ_IN_MAIN, ENCODE_IN_MAIN = 16, 4  # chunks that the main process reads and encodes before it starts workers
MAX_EXAMPLES = 3  # most pairs that a warning names
MAX_HELD_OUT = 5_000  # most tokens of a held-out sentence: the attention weights of its batch must fit in memory
SAMPLE_SEED = 1
# Name of a count -> (largest fraction of a held-out split that causes no warning, text of the warning).
OVERLAPS = {
    "sources_in_train": (0.1, "have a source that is also in train"),
    "pairs_in_train": (0.01, "are also in train"),
}
BLANK = {  # side -> text of the warning about held-out pairs that lack text on this side
    "sources": "have no source text; nothing is translated there",
    "references": "have no reference text; no translation of them can match",
}
# Keys of `data` that do not change the prepared corpus. Instead of paths, the fingerprint takes the files' contents.
_NOT_IN_FINGERPRINT: Any = {
    **dict.fromkeys(("cache_dir", "workers", "train", "validation", "test", "path", "extra"), True),
    "corpora": {"__all__": {"train", "validation", "test"}},
}
_TOKENIZER_NOT_IN_FINGERPRINT: Any = {
    **dict.fromkeys(("sampling", "source_model", "target_model"), True),
    "source": {"sampling"},
    "target": {"sampling"},
}
log = logging.getLogger(__name__)


def prepare(data: schema.Data, tokenizer: schema.TokenizerConfig) -> PreparedCorpus:
    """Open the prepared corpus in the cache; prepare it first if the cache lacks it. Raises UserError."""
    fingerprint = fingerprint_of(data, tokenizer)
    directory = _directory(data, fingerprint)
    if prepared := _from_cache(directory):
        log.info("corpus: prepared before, %s", directory)
        if isinstance(tokenizer, schema.FileTokenizer):
            check_sampling(tokenizer, prepared.tokenizers)  # the cached corpus does not depend on `sampling`
        return prepared
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir={data.cache_dir}: cannot create this directory ({error.strerror})") from None
    with _locked(directory.with_name(f".{directory.name}.lock")):
        if prepared := _from_cache(directory):  # another process has prepared it meanwhile
            return prepared
        if directory.exists():
            log.warning("corpus: %s is incomplete; preparing it again", directory)
            shutil.rmtree(directory)
        working = directory.with_name(f".{directory.name}.part")
        shutil.rmtree(working, ignore_errors=True)  # left by a preparation that was killed
        try:
            with named_errors(directory.parent):
                working.mkdir()
                _prepare(data, tokenizer, fingerprint, working)
                working.rename(directory)  # only now, so that the cache never holds an incomplete corpus
        finally:
            shutil.rmtree(working, ignore_errors=True)
        return PreparedCorpus(directory)


def is_prepared(data: schema.Data, fingerprint: str) -> bool:
    """Check whether the cache holds the corpus with this fingerprint."""
    return _from_cache(_directory(data, fingerprint)) is not None


def _directory(data: schema.Data, fingerprint: str) -> Path:
    return user_path(data.cache_dir) / fingerprint[:24]


def _from_cache(directory: Path) -> PreparedCorpus | None:
    """Open the prepared corpus. Returns None if it does not exist or is incomplete."""
    try:
        return PreparedCorpus(directory)
    except UserError:
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that the jobs of a sweep wait until one of them has prepared the corpus."""
    with path.open("ab") as lock:  # the file stays; closing it releases the lock, also if the process is killed
        if not try_lock(lock.fileno(), path):
            log.info("corpus: another process is preparing it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """Compute the SHA-256 of all that determines a prepared corpus: settings and file contents, but not paths."""
    splits = corpus.splits(data)
    settings = {
        "format": FORMAT,
        "data": data.model_dump(exclude=_NOT_IN_FINGERPRINT),
        "splits": {name: [(source.tag, len(source.files)) for source in split] for name, split in splits.items()},
        "tokenizer": tokenizer.model_dump(exclude=_TOKENIZER_NOT_IN_FINGERPRINT),
    }
    models = []
    if isinstance(tokenizer, schema.FileTokenizer):
        models = [user_path(name) for name in (tokenizer.source_model, tokenizer.target_model) if name]
    files = [path for split in splits.values() for source in split for path in source.files]
    return _digest_of_files([*files, *models], json.dumps(settings, sort_keys=True).encode())


def _digest_of_files(paths: Sequence[Path], prefix: bytes = b"") -> str:
    """Compute the SHA-256 of `prefix`, followed by the SHA-256 of each file."""
    digest = hashlib.sha256(prefix)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the interpreter's lock
        for value in pool.map(_digest_of_file, paths):
            digest.update(value)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _prepare(data: schema.Data, tokenizer: schema.TokenizerConfig, fingerprint: str, working: Path) -> None:
    """Write all files of the prepared corpus to the folder `working`."""
    splits = corpus.splits(data)
    with Workers(data.workers, "data.workers") as workers:
        raw = read_splits(splits, working, tokenizer.lowercase, workers)
        overlaps, warnings = compare_splits(raw, splits)
        log.info("tokenizer: %s", tokenizer.kind)
        source_lines, target_lines = tokenizer_lines(raw["train"], tokenizer)
        tokenizers = make_tokenizers(tokenizer, source_lines, target_lines, data.tags)
        tokenizers.save(working)
        reports = {
            name: encode_split(name, raw[name], sources, working, tokenizer.lowercase, data, workers) | overlaps[name]
            for name, sources in splits.items()
        }
    train = reports["train"]
    if not train["kept"]:
        raise UserError(
            f"data: the filters drop all {train['read']} training pairs (data.max_length={data.max_length}, "
            f"data.max_ratio={data.max_ratio}; pairs dropped by each filter: {train['dropped']})"
        )
    for path in working.glob("*.raw"):
        path.unlink()
    report = {
        "fingerprint": fingerprint,
        "languages": [data.source_lang, data.target_lang],
        "lowercase": tokenizer.lowercase,
        "vocabulary": [side.vocab_size for side in tokenizers],
        "splits": reports,
        "warnings": warnings,
        # The digest of the tokenizers, the token ids of all splits, and the word alignments of train. A run cannot be
        # resumed with a corpus of another digest.
        "content": _digest_of_files(
            sorted([*working.glob("*.model"), *working.glob("*.ids"), *working.glob("train.alignments")])
        ),
    }
    write_atomically(working / "report.json", json.dumps(report, indent=2).encode())


# From the user's files to the usable pairs of each split


class RawChunk(NamedTuple):
    """Consecutive pairs in the temporary file of a split. Each pair takes three lines: source, target, alignment."""

    path: Path
    offset: int  # where the chunk begins in the file, in bytes
    size: int  # length of the chunk in bytes
    pairs: int  # number of pairs

    def columns(self) -> list[list[str]]:
        """Read the sources, the targets and the word alignments."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
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
    """Write the usable pairs of a split to `path`, and describe them in raw[name]. The hashes in `raw` must be complete
    for all held-out splits before train is read."""
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
    Returns the counts and the warnings for the corpus report, also about pairs that lack text on a side."""
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
        in_train = raw["train"].also_held_out
        of_sources, of_pairs = np.concatenate(split.hashes).T
        for hashes, (kind, (limit, text)) in zip((of_sources, of_pairs), OVERLAPS.items(), strict=True):
            numbers = [number for number, value in enumerate(hashes.tolist(), 1) if value in in_train]
            counts[name][kind] = len(numbers)
            if len(numbers) > limit * len(split):
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
    first = 0
    for chunk in chunks:
        yield from compress(chunk.columns()[side], mask[first : first + chunk.pairs].tolist())
        first += chunk.pairs


# From the usable pairs of each split to the files of the prepared corpus


def encode_split(
    name: str, raw: RawSplit, sources: list[Source], working: Path, lowercase: bool, data: schema.Data, workers: Workers
) -> dict[str, Any]:
    """Encode the usable pairs of a split with the tokenizers in `working`, and write the files of the split there.
    Returns the split's part of the corpus report. Raises UserError for a held-out sentence that is too long."""
    limits = (data.max_length, data.max_ratio) if name == "train" else None
    dropped, kept, has_links = Counter(empty=raw.read - len(raw)), 0, False
    bar = tqdm(desc=f"encode {name}", total=len(raw), unit=" pairs", disable=None, leave=False)
    with ExitStack() as stack, bar:
        writers = [SideWriter(working, f"{name}.{side}", stack) for side in Tokenizers._fields]
        alignments = stack.enter_context((working / f"{name}.alignments").open("wb"))
        for chunk in workers.map(partial(_encode, working, lowercase, limits), raw.chunks, ENCODE_IN_MAIN):
            longest = np.maximum(*(side.lengths for side in chunk.sides))
            if limits is None and longest.max() > MAX_HELD_OUT:
                index = int(np.argmax(longest > MAX_HELD_OUT))
                raise UserError(
                    f"{locate(sources, [kept + index + 1])}: has {longest[index]} tokens, more than the {MAX_HELD_OUT} "
                    "allowed in a held-out sentence; shorten the pair or remove it"
                )
            for writer, side in zip(writers, chunk.sides, strict=True):
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
        "tokens": [writer.tokens for writer in writers],
        "longest": [writer.longest for writer in writers],
        "unknown_rate": [writer.unknown / max(1, writer.tokens) for writer in writers],
    }


class _EncodedChunk(NamedTuple):
    """The pairs of a chunk that are kept, and the number of dropped pairs by reason."""

    sides: list[Sentences]
    alignments: list[str]
    dropped: dict[str, int]


def _encode(
    directory: Path, lowercase: bool, limits: tuple[int, float | None] | None, chunk: RawChunk
) -> _EncodedChunk:
    """Encode the pairs of a chunk, and choose those to keep. limits: max_length and max_ratio of training pairs; None
    for held-out pairs, which are all kept. Each process loads the tokenizers at its first chunk."""
    *columns, links = chunk.columns()
    tokenizers = _tokenizers(directory, lowercase)
    ids = [
        tokenizer.encode(["" if is_blank(line) else line for line in lines])
        for tokenizer, lines in zip(tokenizers, columns, strict=True)
    ]
    lengths = np.array([[len(sentence) for sentence in side] for side in ids], np.int32)
    keep, dropped = np.ones(len(links), bool), dict[str, int]()
    if limits is not None:
        keep, dropped = _filter(lengths, *limits)
    sides = []
    for tokenizer, lines, sentences, sizes in zip(tokenizers, columns, ids, lengths, strict=True):
        tokens = np.fromiter(chain.from_iterable(compress(sentences, keep)), IDS)
        texts = [line.encode() for line in compress(lines, keep)]
        text_sizes = np.fromiter(map(len, texts), np.int32, len(texts))
        unknown = int((tokens == tokenizer.unk).sum())
        sides.append(Sentences(tokens, sizes[keep], b"".join(texts), text_sizes, unknown))
    return _EncodedChunk(sides, list(compress(links, keep)), dropped)


def _filter(lengths: Array, max_length: int, max_ratio: float | None) -> tuple[Array, dict[str, int]]:
    """Choose the training pairs to keep -> bool (N,), and count the dropped pairs by reason. `lengths` (2, N) include
    </s>."""
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
