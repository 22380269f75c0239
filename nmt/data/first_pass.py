"""The first pass over a corpus: drop unusable pairs, write the others to a temporary file, train the tokenizers.

While a split is read, what the corpus report and its warnings say is counted, and a random sample of lines is drawn on
which the tokenizers are trained. Worker processes read chunks of pairs; results come in the order of the corpus.
"""

import array
import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data.corpus import CHARACTERS, CHUNK, Concatenation, Pair, Splits, TextChunk, TextFiles, locate
from nmt.data.text import is_blank
from nmt.data.tokenizer import make_tokenizers
from nmt.system.files import read_bytes, write_atomically
from nmt.system.processes import Workers

log = logging.getLogger(__name__)

FIRST_PASS = "first_pass.json"
IN_MAIN = 16  # chunks that the main process reads before it starts workers
FACTOR = np.int64(-7046029254386353131)  # odd; makes a hash of a pair from those of its sides
HASHES = 2**22  # compared at a time
MAX_EXAMPLES = 3  # pairs named in a warning
WARNINGS = {  # the share of a split's pairs above which to warn, and what these pairs do
    "duplicates": (0.1, "repeat an earlier pair"),
    "copies": (0.05, "have the same text on both sides"),
    "blank_sources": (0, "have no source text; nothing is translated there"),
    "blank_references": (0, "have no reference text; no translation of them can match"),
    "sources_in_train": (0.1, "have a source that is also in train"),
    "pairs_in_train": (0.01, "are also in train"),
}
SAMPLE_SEED = 1
STEP = 2**16  # lines of the sample read at a time
ALL = 2.0  # a threshold above every priority

Array = NDArray[Any]
Chunk = TextChunk | list[Pair]
Row = tuple[str, str, str]  # source, target and word alignment of a pair
Thresholds = tuple[float, float]  # of sources and targets


@dataclass
class FirstPass:
    """What the first pass leaves behind, beside the tokenizers."""

    usable: dict[str, "UsablePairs"]  # by split
    matches: dict[str, dict[str, int]]  # number of a split's pairs for each of WARNINGS
    warnings: list[str]

    @classmethod
    def load(cls, working: Path) -> "FirstPass | None":
        """Read what `save` wrote; None if the first pass was not finished there."""
        try:
            values = json.loads(read_bytes(working / FIRST_PASS))
        except FileNotFoundError:
            return None
        usable = {name: UsablePairs.from_json(_raw(working, name), split) for name, split in values["usable"].items()}
        return cls(usable, values["matches"], values["warnings"])

    def save(self, working: Path) -> None:
        """Write first_pass.json, which says that the first pass is complete."""
        usable = {name: {"chunks": pairs.chunks, "counts": pairs.counts} for name, pairs in self.usable.items()}
        values = {"usable": usable, "matches": self.matches, "warnings": self.warnings}
        write_atomically(working / FIRST_PASS, json.dumps(values).encode())

    def delete(self, working: Path) -> None:
        """Delete all files of the first pass but the tokenizers."""
        (working / FIRST_PASS).unlink()
        for pairs in self.usable.values():
            pairs.path.unlink()


def _raw(working: Path, name: str) -> Path:
    return working / f"{name}.raw"


def read_corpus(
    data: schema.Data, tokenizer: schema.TokenizerConfig, splits: Splits, working: Path, workers: Workers
) -> FirstPass:
    """Read the splits, train last, and make the tokenizers. Raises UserError."""
    statistics, sample = PairStatistics(), None
    if not isinstance(tokenizer, schema.FileTokenizer):
        sample = TokenizerSample(working, tokenizer.max_train_lines, tokenizer.joint)
    usable = {}
    for name in [*(name for name in splits if name != "train"), "train"]:
        drawn = sample if name == "train" else None
        usable[name] = _read_split(name, splits[name], _raw(working, name), workers, statistics, drawn)
    log.info("tokenizer: %s", tokenizer.kind)
    source, target = (partial(sample.lines, side) if sample else lambda: iter(()) for side in (0, 1))
    make_tokenizers(tokenizer, source, target, data.tags).save(working)
    if sample:
        sample.delete()
    matches = {name: statistics.matches(name) for name in splits}
    totals = {name: {kind: match.total for kind, match in kinds.items()} for name, kinds in matches.items()}
    counts = {name: len(pairs) for name, pairs in usable.items()}
    result = FirstPass(usable, totals, corpus_warnings(splits, matches, counts))
    result.save(working)
    return result


def corpus_warnings(
    splits: Mapping[str, Iterable[Pair]], matches: Mapping[str, Mapping[str, "Matches"]], counts: Mapping[str, int]
) -> list[str]:
    """One line per warning. By split: pairs as read, matches of WARNINGS and the number of usable pairs."""
    warnings = []
    for name, pairs in splits.items():
        for kind, (total, examples) in matches[name].items():
            max_share, text = WARNINGS[kind]
            if total > max_share * counts[name]:
                warnings.append(f"{name}: {total} of {counts[name]} pairs {text}, such as {locate(pairs, examples)}")
    return warnings


# Reading a split


class RawChunk(NamedTuple):
    """Consecutive pairs in the temporary file."""

    start: int  # bytes
    size: int
    pairs: int
    crc: int  # of the bytes

    def rows(self, path: Path) -> list[Row]:
        """Read the pairs. Raises UserError if the file has changed."""
        with path.open("rb") as file:
            file.seek(self.start)
            content = file.read(self.size)
        if zlib.crc32(content) != self.crc:
            raise UserError(f"{path}: is damaged; prepare the corpus again")
        lines = content.decode().split("\n")
        return list(zip(lines[0:-1:3], lines[1::3], lines[2::3], strict=True))


@dataclass
class UsablePairs:
    """The usable pairs of a split in a temporary file: three lines a pair (source, target, word alignment)."""

    path: Path
    chunks: list[RawChunk] = field(default_factory=list)
    counts: "Counter[str]" = field(default_factory=Counter)  # read, and dropped by reason

    def __len__(self) -> int:
        return sum(chunk.pairs for chunk in self.chunks)

    @classmethod
    def from_json(cls, path: Path, values: dict[str, Any]) -> "UsablePairs":
        """Restore what FirstPass.save wrote."""
        return cls(path, [RawChunk(*chunk) for chunk in values["chunks"]], Counter(values["counts"]))


class _Task(NamedTuple):
    number: int  # of the chunk
    first: int  # number of its first pair
    chunk: Chunk
    thresholds: Thresholds | None  # of the tokenizer's sample; None for held-out splits


class _Result(NamedTuple):
    raw: bytes
    pairs: int
    crc: int
    counts: "Counter[str]"
    facts: "PairFacts"
    candidates: "tuple[Candidates, Candidates] | None"


def _read_split(
    name: str,
    pairs: Iterable[Pair],
    path: Path,
    workers: Workers,
    statistics: "PairStatistics",
    sample: "TokenizerSample | None",
) -> UsablePairs:
    """Write the usable pairs of a split to `path`, count all, and draw the tokenizer's training lines.

    Raises UserError for an unreadable file and if no pair is usable.
    """
    result, without_reference = UsablePairs(path), 0
    bar = tqdm(desc=f"read {name}", unit=" pairs", disable=None, leave=False)
    with path.open("wb") as file, bar:
        for part in workers.map(partial(_read_chunk, train=name == "train"), _tasks(pairs, sample), IN_MAIN):
            result.chunks.append(RawChunk(file.tell(), len(part.raw), part.pairs, part.crc))
            file.write(part.raw)
            result.counts += part.counts
            statistics.add(name, part.facts)
            without_reference += len(part.facts.blank_references)
            if sample is not None and part.candidates is not None:
                sample.add(*part.candidates)
            bar.update(part.counts["read"])
    if not len(result):
        raise UserError(
            f"data: none of the {result.counts['read']} pairs read for {name} can be used (see data.{name})"
        )
    if name != "train" and without_reference == len(result):
        raise UserError(f"data.{name}: none of its {len(result)} pairs has a reference text, so nothing can be scored")
    return result


def _tasks(pairs: Iterable[Pair], sample: "TokenizerSample | None") -> Iterator[_Task]:
    first = 1
    for number, chunk in enumerate(chunks(pairs)):
        yield _Task(number, first, chunk, None if sample is None else sample.thresholds)
        first += len(chunk)


def chunks(pairs: Iterable[Pair]) -> Iterator[Chunk]:
    """Divide the pairs of a source into chunks that depend on the source alone."""
    if isinstance(pairs, TextFiles):
        yield from pairs.chunks()
    elif isinstance(pairs, Concatenation):
        for part in pairs.parts:
            yield from chunks(part)
    else:
        chunk: list[Pair] = []
        size = 0
        for pair in pairs:
            chunk.append(pair)
            size += len(pair.source or "") + len(pair.target or "")
            if len(chunk) == CHUNK or size > CHARACTERS:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def _read_chunk(task: _Task, train: bool) -> _Result:
    """Drop invalid pairs, and training pairs with an empty side; held-out pairs are all translated and scored."""
    pairs = list(task.chunk)
    counts = Counter(read=len(pairs))
    sources, targets, raw = list[str](), list[str](), list[str]()
    for source, target, alignment in pairs:
        if source is None or target is None:
            counts["invalid_utf8"] += 1
        elif train and (is_blank(source) or is_blank(target)):
            counts["empty"] += 1
        else:
            sources.append(source)
            targets.append(target)
            raw.append(f"{source}\n{target}\n{alignment}\n")
    content = "".join(raw).encode()
    candidates = None
    if task.thresholds is not None:
        candidates = (
            Candidates.draw(sources, task.thresholds[0], (task.number, 0)),
            Candidates.draw(targets, task.thresholds[1], (task.number, 1)),
        )
    return _Result(content, len(raw), zlib.crc32(content), counts, PairFacts.of(pairs, task.first), candidates)


# What the warnings count


class Matches(NamedTuple):
    """Number of pairs with some property, and the numbers of the first few."""

    total: int = 0
    examples: tuple[int, ...] = ()

    def plus(self, numbers: Sequence[int]) -> "Matches":
        """Add the pairs with these numbers."""
        return Matches(self.total + len(numbers), (*self.examples, *numbers)[:MAX_EXAMPLES])


@dataclass(frozen=True)
class PairFacts:
    """What the warnings need to know of N consecutive pairs of a split."""

    usable: Array  # bool (N,): both sides have text
    hashes: Array  # int64 (N, 2) of source and of pair, equal in all processes; the pair's number if it is not usable
    copies: list[int]  # numbers of pairs with the same text on both sides
    blank_sources: list[int]  # numbers of pairs without any visible character there
    blank_references: list[int]

    @classmethod
    def of(cls, pairs: Sequence[Pair], first: int) -> "PairFacts":
        """Collect the facts. first: number of the first pair, from 1."""
        digests, usable, copies = list[bytes](), list[bool](), list[int]()
        blank: tuple[list[int], list[int]] = ([], [])
        for number, (source, target, _) in enumerate(pairs, first):
            for side, text in enumerate((source, target)):
                if text is not None and is_blank(text):
                    blank[side].append(number)
            if source and target and number not in (*blank[0][-1:], *blank[1][-1:]):
                digests += [_digest(source), _digest(target)]
                usable.append(True)
                if source == target:
                    copies.append(number)
            else:
                usable.append(False)
        numbers = range(first, first + len(pairs))
        hashes = np.repeat(np.asarray(numbers, dtype=np.int64), 2).reshape(-1, 2)
        sides = np.frombuffer(b"".join(digests), dtype="<i8").reshape(-1, 2)
        mask = np.array(usable, dtype=bool)
        hashes[mask, 0] = sides[:, 0]
        hashes[mask, 1] = sides[:, 0] * FACTOR + sides[:, 1]
        return cls(mask, hashes, copies, *blank)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class PairStatistics:
    """Counts the pairs that each of WARNINGS is about, while the splits are read, train last.

    Needs 8 bytes per training pair (16 for a moment at the end) and about 200 per held-out pair.
    """

    def __init__(self) -> None:
        self._train = array.array("q")  # hash of each pair
        self._held_out: dict[str, list[Array]] = {}  # hashes (N, 2) of each chunk
        self._sorted: Array | None = None  # all hashes of held-out pairs
        self._matches: dict[str, dict[str, Matches]] = {}
        self._in_train: set[int] = set()  # hashes of held-out sources and pairs that train contains too

    def add(self, name: str, facts: PairFacts) -> None:
        """Count the next pairs of a split."""
        kinds = ("copies",) if name == "train" else ("copies", "blank_sources", "blank_references")
        matches = self._matches.setdefault(name, dict.fromkeys(kinds, Matches()))
        for kind in kinds:
            matches[kind] = matches[kind].plus(getattr(facts, kind))
        if name != "train":
            self._held_out.setdefault(name, []).append(facts.hashes)
            return
        if self._sorted is None:
            self._sorted = np.unique(np.concatenate([hashes for split in self._held_out.values() for hashes in split]))
        self._train.frombytes(facts.hashes[:, 1].tobytes())
        hashes = facts.hashes[facts.usable]
        nearest = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        self._in_train.update(hashes[(self._sorted[nearest] == hashes).any(axis=1)].ravel().tolist())

    def matches(self, name: str) -> dict[str, Matches]:
        """Return the matches in a split, by the keys of WARNINGS. Call it after all splits were read."""
        if name == "train":
            return {"duplicates": self._duplicates(), **self._matches[name]}
        matches = dict(self._matches[name])
        hashes = np.concatenate(self._held_out[name])
        for kind, column in (("sources_in_train", 0), ("pairs_in_train", 1)):
            values = hashes[:, column].tolist()
            matches[kind] = Matches().plus(
                [number for number, value in enumerate(values, 1) if value in self._in_train]
            )
        return matches

    def _duplicates(self) -> Matches:
        """Count training pairs that repeat an earlier one; the examples are all occurrences of the first of them."""
        hashes = np.frombuffer(self._train, dtype=np.int64)
        ordered = np.sort(hashes)
        repeats = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(repeats):
            return Matches()
        del ordered
        for start in range(0, len(hashes), HASHES):
            part = hashes[start : start + HASHES]
            nearest = np.minimum(np.searchsorted(repeats, part), len(repeats) - 1)
            if (repeated := repeats[nearest] == part).any():
                first = part[np.argmax(repeated)]
                break
        examples: list[int] = []
        for start in range(0, len(hashes), HASHES):
            examples += (np.flatnonzero(hashes[start : start + HASHES] == first) + start + 1).tolist()
        return Matches(len(repeats), tuple(examples[:MAX_EXAMPLES]))


# The lines that tokenizers are trained on


class Candidates(NamedTuple):
    """Lines of one side that may belong to the sample."""

    priorities: Array  # float64 (N,)
    text: bytes  # N lines

    @classmethod
    def draw(cls, lines: Sequence[str], threshold: float, seed: Sequence[int]) -> "Candidates":
        """Give each line a random priority in [0, 1) and choose those below the threshold."""
        priorities = np.random.default_rng([SAMPLE_SEED, *seed]).random(len(lines))
        chosen = priorities < threshold
        return cls(priorities[chosen], "".join(f"{line}\n" for line in compress(lines, chosen)).encode())


class TokenizerSample:
    """The `max_lines` lines of lowest priority, of both sides together or of each, in their order in the corpus.

    This is reservoir sampling: a threshold, the largest priority that may still belong to the sample, falls while lines
    are added. Candidates are in files: about max_lines (1 + log(lines / max_lines)) lines, if there are more than
    max_lines.
    """

    def __init__(self, directory: Path, max_lines: int, joint: bool) -> None:
        self._paths = [directory / f"sample.{side}" for side in ("source", "target")]
        self._max_lines, self._joint = max_lines, joint
        self._thresholds = [ALL, ALL]
        self._lowest: list[list[Array]] = [[] for _ in range(1 if joint else 2)]  # priorities of candidates

    @property
    def thresholds(self) -> Thresholds:
        """Priorities above which lines are certainly not in the sample."""
        source, target = self._thresholds
        return source, target

    def add(self, source: Candidates, target: Candidates) -> None:
        """Add the next candidates, drawn with thresholds of now or before."""
        for side, (path, (priorities, text)) in enumerate(zip(self._paths, (source, target), strict=True)):
            with path.open("ab") as file:
                file.write(text)
            with _priorities(path).open("ab") as file:
                file.write(priorities.tobytes())
            group = 0 if self._joint else side
            self._lowest[group].append(priorities)
            self._prune(group, 2 * self._max_lines)

    def _prune(self, group: int, limit: int) -> None:
        """Keep the `max_lines` lowest priorities if there are more than `limit`; the next one is the new threshold."""
        if sum(map(len, self._lowest[group])) <= limit:
            return
        lowest = np.partition(np.concatenate(self._lowest[group]), self._max_lines)
        self._lowest[group] = [lowest[: self._max_lines]]
        for side in (0, 1) if self._joint else (group,):
            self._thresholds[side] = float(lowest[self._max_lines])

    def lines(self, side: int) -> Iterator[str]:
        """Read the sample's sources (0) or targets (1)."""
        self._prune(0 if self._joint else side, self._max_lines)
        path, threshold = self._paths[side], self._thresholds[side]
        with path.open(encoding="utf-8", newline="\n") as text, _priorities(path).open("rb") as file:
            while step := file.read(8 * STEP):
                chosen = (np.frombuffer(step) < threshold).tolist()
                yield from (line[:-1] for line in compress(islice(text, len(chosen)), chosen))

    def delete(self) -> None:
        """Delete the sample's files."""
        for path in self._paths:
            path.unlink(missing_ok=True)
            _priorities(path).unlink(missing_ok=True)


def _priorities(path: Path) -> Path:
    return path.with_name(f"{path.name}.priorities")
