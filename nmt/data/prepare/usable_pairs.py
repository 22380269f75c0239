"""The first pass over a split: read it, drop unusable pairs, write the others to a temporary file."""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.data.prepare.chunking import Chunk, chunks
from nmt.data.prepare.tokenizer_sample import Candidates, Thresholds, TokenizerSample
from nmt.data.prepare.warnings import MAX_SAMPLE, PairFacts, PairStatistics, Sample
from nmt.data.prepare.workers import Workers
from nmt.data.reading.sources import Pair
from nmt.data.reading.text import is_blank

IN_MAIN = 16  # chunks that the main process reads before it starts workers
SAMPLED_CHUNKS = 100  # chunks that a sample of a split comes from

Row = tuple[str, str, str]  # source, target and word alignment of a pair


class RawChunk(NamedTuple):
    """Consecutive pairs in the temporary file."""

    start: int  # bytes
    size: int
    pairs: int
    crc: int  # of the bytes

    def rows(self, path: Path) -> list[Row]:
        """Raises UserError if the file has changed."""
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

    def sample(self) -> Sample:
        """About MAX_SAMPLE pairs, spread over the split."""
        some = [chunk for chunk in self.chunks if chunk.pairs]
        some = some[:: -(-len(some) // SAMPLED_CHUNKS)]
        step = -(-sum(chunk.pairs for chunk in some) // MAX_SAMPLE)
        return [
            (source, target) for chunk in some for source, target, _ in islice(chunk.rows(self.path), 0, None, step)
        ]

    def to_json(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "counts": self.counts}

    @classmethod
    def from_json(cls, path: Path, values: dict[str, Any]) -> "UsablePairs":
        return cls(path, [RawChunk(*chunk) for chunk in values["chunks"]], Counter(values["counts"]))


class _Task(NamedTuple):
    number: int  # of the chunk
    first: int  # number of its first pair
    chunk: Chunk
    thresholds: Thresholds | None  # of the tokenizer's sample; None: draw none


class _Result(NamedTuple):
    raw: bytes
    pairs: int
    crc: int
    counts: "Counter[str]"
    facts: PairFacts
    candidates: tuple[Candidates, Candidates] | None


def read_usable(
    name: str,
    pairs: Iterable[Pair],
    path: Path,
    workers: Workers,
    statistics: PairStatistics,
    sample: TokenizerSample | None,
) -> UsablePairs:
    """Write the usable pairs of a split to `path`, count all, and draw the tokenizer's training lines.

    Raises UserError for an unreadable file and if no pair is usable.
    """
    result, without_reference = UsablePairs(path), 0
    bar = tqdm(desc=f"read {name}", unit=" pairs", disable=None, leave=False)
    with path.open("wb") as file, bar:
        for part in workers.map(partial(_read, train=name == "train"), _tasks(pairs, sample), IN_MAIN):
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


def _tasks(pairs: Iterable[Pair], sample: TokenizerSample | None) -> Iterator[_Task]:
    first = 1
    for number, chunk in enumerate(chunks(pairs)):
        yield _Task(number, first, chunk, None if sample is None else sample.thresholds)
        first += len(chunk)


def _read(task: _Task, train: bool) -> _Result:
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
    facts = PairFacts.of(pairs, task.first)
    return _Result(content, len(raw), zlib.crc32(content), counts, facts, _candidates(task, (sources, targets)))


def _candidates(task: _Task, sides: Sequence[Sequence[str]]) -> tuple[Candidates, Candidates] | None:
    if task.thresholds is None:
        return None
    source, target = (
        Candidates.draw(lines, threshold, (task.number, side))
        for side, (lines, threshold) in enumerate(zip(sides, task.thresholds, strict=True))
    )
    return source, target
