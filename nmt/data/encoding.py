"""The second pass over a split: encode its usable pairs, drop training pairs by length, write the files of `Prepared`.

The files are written chunk by chunk with a journal, so that a preparation that was killed can be continued.
"""

import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain, compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nmt.config.schema import data as schema
from nmt.data.first_pass import RawChunk, UsablePairs
from nmt.data.prepared import IDS
from nmt.data.text import is_blank
from nmt.data.tokenizer import Tokenizers
from nmt.system.files import write_lines
from nmt.system.processes import Workers

IN_MAIN = 4  # chunks that the main process encodes before it starts workers
JOURNAL = "journal.jsonl"
MAX_HELD_OUT = 5_000  # tokens of a held-out sentence, so that the attention of its batch fits in memory
LENGTHS = np.dtype("<i4")
STEP = 2**20  # lengths read at a time
SIDES = ("source", "target")
SUFFIXES = {*(f"{side}.{name}" for side in SIDES for name in ("ids", "txt", "lengths", "bytes")), "alignments"}
Array = NDArray[Any]
Report = dict[str, Any]


class EncodedChunk(NamedTuple):
    """What a chunk adds to each file of its split, and its counts."""

    contents: dict[str, bytes]  # by the file's suffix
    too_long: tuple[int, int] | None  # first pair (from 0) of a held-out split that is too long, and its tokens
    entry: dict[str, Any]  # for the journal


class Encoder:
    """Encodes chunks of the usable pairs of a split. Each process loads the tokenizers when it needs them first."""

    def __init__(self, name: str, path: Path, lowercase: bool, data: schema.Data) -> None:
        """name: of the split; path: of its usable pairs, beside the tokenizers."""
        self.name, self.path, self.lowercase = name, path, lowercase
        self.max_length, self.max_ratio = data.max_length, data.max_ratio

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        rows, tokenizers = chunk.rows(self.path), _tokenizers(self.path.parent, self.lowercase)
        sides = [[row[side] for row in rows] for side in (0, 1)]
        shown = [["" if is_blank(line) else line for line in lines] for lines in sides]
        ids = [tokenizer.encode(lines) for tokenizer, lines in zip(tokenizers, shown, strict=True)]
        lengths = np.array([[len(sentence) for sentence in side] for side in ids], LENGTHS)
        kept, dropped = np.ones(len(rows), bool), dict[str, int]()
        longest, too_long = lengths.max(axis=0, initial=0), None
        if self.name == "train":
            kept, dropped = self._filter(lengths)
        elif len(rows) and longest.max() > MAX_HELD_OUT:
            index = int(np.argmax(longest > MAX_HELD_OUT))
            too_long = index, int(longest[index])
        contents, unknown = {}, []
        for name, tokenizer, lines, sentences, sizes in zip(SIDES, tokenizers, sides, ids, lengths, strict=True):
            tokens = np.fromiter(chain.from_iterable(compress(sentences, kept)), IDS)
            texts = [line.encode() for line in compress(lines, kept)]
            contents[f"{name}.ids"] = tokens.tobytes()
            contents[f"{name}.txt"] = b"".join(texts)
            contents[f"{name}.lengths"] = sizes[kept].tobytes()
            contents[f"{name}.bytes"] = np.fromiter(map(len, texts), LENGTHS, len(texts)).tobytes()
            unknown.append(int((tokens == tokenizer.unk).sum()))
        links = [row[2] for row in compress(rows, kept)]
        contents["alignments"] = "".join(f"{line}\n" for line in links).encode()
        entry = {
            "split": self.name,
            "files": {name: (len(content), zlib.crc32(content)) for name, content in contents.items()},
            "kept": int(kept.sum()),
            "dropped": dropped,
            "tokens": lengths[:, kept].sum(axis=1, dtype=int).tolist(),
            "longest": lengths[:, kept].max(axis=1, initial=0).tolist(),
            "unknown": unknown,
            "links": any(links),
        }
        return EncodedChunk(contents, too_long, entry)

    def _filter(self, lengths: Array) -> tuple[Array, dict[str, int]]:
        """Choose the training pairs to keep, and count the others by reason. Lengths (2, N) include </s>."""
        shortest, longest = lengths.min(axis=0), lengths.max(axis=0)
        reasons = {
            "empty": shortest == 1,  # nothing that the tokenizer can see, such as a zero-width space
            "too_long": longest > self.max_length,
            "ratio": longest > (np.inf if self.max_ratio is None else self.max_ratio) * shortest,
        }
        kept = np.ones(lengths.shape[1], bool)
        dropped = {}
        for reason, mask in reasons.items():
            if count := int((kept & mask).sum()):
                dropped[reason] = count
            kept &= ~mask
        return kept, dropped


@lru_cache(1)
def _tokenizers(directory: Path, lowercase: bool) -> Tokenizers:
    return Tokenizers.load(directory, lowercase)


class EncodedSplit:
    """The files of a split, which grow chunk by chunk."""

    def __init__(self, directory: Path, name: str, entries: Iterable[dict[str, Any]] = ()) -> None:
        """entries: of the journal of a killed preparation; those that the files contain are used."""
        self._directory, self.name = directory, name
        self.entries = self._verified(entries)

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{self.name}.{suffix}"

    def _verified(self, entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries whose bytes the files hold undamaged, and cut the files off after these."""
        sizes, verified = Counter[str](), []
        for entry in entries:
            if not all(_holds(self._path(name), sizes[name], *expected) for name, expected in entry["files"].items()):
                break
            sizes.update({name: size for name, (size, _) in entry["files"].items()})
            verified.append(entry)
        for path in self._directory.glob(f"{self.name}.*"):
            suffix = path.name.removeprefix(f"{self.name}.")
            if suffix in SUFFIXES and path.stat().st_size > sizes[suffix]:
                os.truncate(path, sizes[suffix])
        return verified

    def encode(self, usable: UsablePairs, encoder: Encoder, workers: Workers) -> Iterator[EncodedChunk]:
        """Encode and write the chunks that are not yet written. Yields each chunk before it is written."""
        done = len(self.entries)
        bar = tqdm(desc=f"encode {self.name}", total=len(usable), unit=" pairs", disable=None, leave=False)
        bar.update(sum(chunk.pairs for chunk in usable.chunks[:done]))
        with bar:
            encoded = workers.map(encoder, usable.chunks[done:], IN_MAIN)
            for raw, chunk in zip(usable.chunks[done:], encoded, strict=True):
                yield chunk
                for suffix, content in chunk.contents.items():
                    with self._path(suffix).open("ab") as file:
                        file.write(content)
                with (self._directory / JOURNAL).open("a") as journal:
                    journal.write(f"{json.dumps(chunk.entry)}\n")
                self.entries.append(chunk.entry)
                bar.update(raw.pairs)

    def report(self, counts: "Counter[str]") -> Report:
        """Make the split's part of the corpus report. counts: of the first pass."""
        dropped = Counter({reason: count for reason, count in counts.items() if reason != "read"})
        for entry in self.entries:
            dropped.update(entry["dropped"])
        tokens, unknown = (
            [sum(entry[key][side] for entry in self.entries) for side in (0, 1)] for key in ("tokens", "unknown")
        )
        return {
            "read": counts["read"],
            "kept": sum(entry["kept"] for entry in self.entries),
            "dropped": dict(dropped),
            "tokens": tokens,
            "longest": [max((entry["longest"][side] for entry in self.entries), default=0) for side in (0, 1)],
            "unknown_rate": [count / max(1, size) for count, size in zip(unknown, tokens, strict=True)],
        }

    def finish(self) -> None:
        """Turn lengths into offsets, and delete what `Prepared` does not read."""
        for side in SIDES:
            for lengths, offsets in (("lengths", "offsets"), ("bytes", "lines")):
                _write_offsets(self._path(f"{side}.{lengths}"), self._path(f"{side}.{offsets}.npy"))
        if not any(entry["links"] for entry in self.entries):
            self._path("alignments").unlink()
        for side in SIDES:
            self._path(f"{side}.lengths").unlink()
            self._path(f"{side}.bytes").unlink()


def read_journal(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the entries of each split, without a last one that a kill has cut short."""
    entries = defaultdict(list)
    path = directory / JOURNAL
    with suppress(ValueError):
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            entries[entry["split"]].append(entry)
    return entries


def write_journal(directory: Path, splits: Iterable[EncodedSplit]) -> None:
    """Write the journal of all splits anew."""
    entries = [entry for split in splits for entry in split.entries]
    write_lines(directory / JOURNAL, map(json.dumps, entries))


def _holds(path: Path, start: int, size: int, crc: int) -> bool:
    """Does the file contain bytes with this checksum there?"""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(size)
    return len(content) == size and zlib.crc32(content) == crc


def _write_offsets(lengths: Path, offsets: Path) -> None:
    """Convert a file of lengths (N,) to offsets (N + 1,) of the beginnings and of the end."""
    count, end = lengths.stat().st_size // LENGTHS.itemsize, 0
    with lengths.open("rb") as source, offsets.open("wb") as file:
        # Not `file` itself: NumPy would write with C functions, whose errors do not mention a full disk.
        header = {"descr": "<i8", "fortran_order": False, "shape": (count + 1,)}
        np.lib.format.write_array_header_1_0(SimpleNamespace(write=file.write), header)
        file.write(np.zeros(1, "<i8").tobytes())
        while content := source.read(STEP * LENGTHS.itemsize):
            part = end + np.cumsum(np.frombuffer(content, LENGTHS), dtype="<i8")
            file.write(part.tobytes())
            end = int(part[-1])
