"""The files of a prepared corpus: written part by part, read as memory-mapped arrays."""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers
from nmt.data.word_alignment import parse_pharaoh
from nmt.system.files import check_contained, checksum, raise_system_error, read_bytes, write_atomically

FORMAT = 4  # part of the fingerprint: increase it when the files change
IDS = np.dtype("<i4")
CHECKSUMS = "checksums.json"
CHUNK = 2**22  # numbers checked at a time
THREADS = 4  # that compute checksums

LARGE = 2**28  # bytes; what can be read in a moment is not remembered
RECENT = 0.1  # seconds after a change in which the clock of some file systems does not show another change
MAX_ENTRIES = 1000

State = list[list[Any]]
_lock = threading.Lock()
Array = NDArray[Any]


class Prepared:
    """A prepared corpus: its splits, tokenizers and report."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError if the directory is not a complete, undamaged corpus of this format."""
        self.directory = directory
        try:
            check_contained(directory)
            self.report: dict[str, Any] = json.loads(read_bytes(directory / "report.json"))
            self.fingerprint: str = self.report["fingerprint"]
            names, lowercase = self.report["splits"].keys(), self.report["lowercase"]
            if not {"train", "validation"} <= names <= {"train", "validation", "test"}:
                raise ValueError("it lacks train or validation")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise_system_error(error)
            raise UserError(f"{directory}: is not a prepared corpus ({error})") from None
        self.tokenizers = Tokenizers.load(directory, lowercase)
        self.splits = {name: Split(directory, name) for name in names}
        self._check_content()

    def _check_content(self) -> None:
        """Raise UserError for damaged files. Large files are read only once, until they change."""
        folder, key = self.directory.resolve().parent, f"checked {self.directory.resolve()}"
        state = state_of(self.directory.iterdir())
        if recall(folder, key, state) is not None:
            return
        for split in self:
            split.source.check(self.tokenizers.source.vocab_size)
            split.target.check(self.tokenizers.target.vocab_size)
        _check_sums(self.directory)
        remember(folder, key, state, "undamaged")

    def __iter__(self) -> Iterator["Split"]:
        return iter(self.splits.values())


class Split:
    """Both sides of a split and its gold word alignments, if any."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.source, self.target = Side(directory, f"{name}.source"), Side(directory, f"{name}.target")
        self._alignments = directory / f"{name}.alignments"
        if len(self.source) != len(self.target):
            raise _damaged(directory, f"{name} has sides of different length")

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def alignments(self) -> Sequence[str] | None:
        """Return the gold alignments, a Pharaoh line for each pair, or None."""
        if not self._alignments.exists():
            return None
        alignments = Alignments(self._alignments)
        if len(alignments) != len(self):
            raise _damaged(self._alignments, f"has {len(alignments)} lines for {len(self)} pairs")
        return alignments


class Side:
    """The N sentences of one language of a split, by index."""

    def __init__(self, directory: Path, name: str) -> None:
        try:
            self.offsets, self.line_ends = (
                np.lib.format.open_memmap(directory / f"{name}.{kind}.npy", mode="r") for kind in ("offsets", "lines")
            )
            self.tokens: Array = _mapped(directory / f"{name}.ids", IDS)
            self._text: Array = _mapped(directory / f"{name}.txt", np.dtype("u1"))
        except (OSError, ValueError) as error:
            raise_system_error(error)
            raise _damaged(directory, f"the prepared corpus is incomplete ({error})") from None
        self._name = f"{directory}: {name}"
        valid = _span(self.offsets, len(self.tokens)) and _span(self.line_ends, len(self._text))
        if not valid or len(self.offsets) != len(self.line_ends):
            raise _damaged(directory, f"{name} does not match its offsets")

    def check(self, vocabulary: int) -> None:
        """Raise UserError if the offsets decrease or a token id is not in the vocabulary."""
        if not (_are_apart(self.offsets, 1) and _are_apart(self.line_ends, 0)):
            raise _damaged(self._name, "does not match its offsets")
        chunks = (self.tokens[start : start + CHUNK] for start in range(0, len(self.tokens), CHUNK))
        if any(bool(chunk.min() < 0) or bool(chunk.max() >= vocabulary) for chunk in chunks):
            raise _damaged(self._name, "has token ids that are not in the tokenizer's vocabulary")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths_of(self, indices: Array) -> Array:
        """Count the tokens of these sentences, with </s> -> int64 (B,)."""
        lengths: Array = self.offsets[indices + 1] - self.offsets[indices]
        return lengths

    @property
    def lengths(self) -> Array:
        """Count the tokens of each sentence, with </s> -> int32 (N,)."""
        return self.lengths_in([(0, len(self))])

    def lengths_in(self, ranges: Sequence[tuple[int, int]]) -> Array:
        """Count the tokens of the sentences in these ranges, with </s> -> int32 (N,)."""
        lengths = np.empty(sum(end - start for start, end in ranges), np.int32)
        done = 0
        for first, last in ranges:
            for start in range(first, last, CHUNK):
                end = min(start + CHUNK, last)
                lengths[done : done + end - start] = np.diff(self.offsets[start : end + 1])
                done += end - start
        return lengths

    def ids(self, index: int) -> Array:
        """Return the token ids of a sentence, </s> last."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def line(self, index: int) -> str:
        """Return the raw text of a sentence."""
        raw = bytes(self._text[self.line_ends[index] : self.line_ends[index + 1]])
        try:
            (line,) = raw.decode("utf-8").split("\n")
        except ValueError:
            raise _damaged(self._name, f"sentence {index + 1} is not one line of valid UTF-8") from None
        return line

    def lines(self) -> list[str]:
        """Return the raw text of all sentences."""
        return [self.line(index) for index in range(len(self))]


class Alignments(Sequence[str]):
    """The gold word alignments of a split: a Pharaoh line for each pair."""

    def __init__(self, path: Path) -> None:
        self._path, self._text = path, _mapped(path, np.dtype("u1"))
        starts = range(0, len(self._text), CHUNK)
        ends = [start + np.flatnonzero(self._text[start : start + CHUNK] == ord("\n")) for start in starts]
        self._ends = np.concatenate([np.zeros(0, np.int64), *ends])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = self._ends[index - 1] + 1 if index else 0
        try:
            line = bytes(self._text[start : self._ends[index]]).decode("utf-8")
            parse_pharaoh(line)
        except ValueError as error:
            raise _damaged(f"{self._path}, line {index + 1}", f"is invalid ({error})") from None
        return line


def write_checksums(directory: Path) -> None:
    """Write checksums.json, of all other files in the directory."""
    paths = [path for path in sorted(directory.iterdir()) if path.name != CHECKSUMS]
    sums = dict(zip([path.name for path in paths], _checksums(paths), strict=True))
    write_atomically(directory / CHECKSUMS, json.dumps(sums, indent=2).encode())


def _check_sums(directory: Path) -> None:
    """Raise UserError for a file that has changed since it was written."""
    try:
        sums = json.loads(read_bytes(directory / CHECKSUMS))
        values = _checksums([directory / name for name in sums])
        changed = [name for name, value in zip(sums, values, strict=True) if value != sums[name]]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise_system_error(error)
        raise UserError(f"{directory}: is not a prepared corpus ({error})") from None
    if changed:
        raise _damaged(directory, f"{changed[0]} is damaged (its checksum differs)")


def _checksums(paths: Iterable[Path]) -> list[int]:
    with ThreadPoolExecutor(THREADS) as pool:  # zlib releases the interpreter's lock
        return list(pool.map(checksum, paths))


def _damaged(path: Path | str, reason: str) -> UserError:
    return UserError(f"{path}: {reason}; delete the folder to prepare the corpus again")


def _span(offsets: Array, end: int) -> bool:
    """Do these offsets begin at 0 and end at `end`?"""
    if offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets[1:]):
        return False
    return bool(offsets[0] == 0 and offsets[-1] == end)


def _are_apart(offsets: Array, min_length: int) -> bool:
    """Do these offsets increase by at least `min_length`?"""
    # Chunks overlap by one number. The comparison comes first: a difference may overflow.
    return all(
        bool((part[1:] >= part[:-1]).all()) and bool((np.diff(part) >= min_length).all())
        for part in (offsets[start : start + CHUNK + 1] for start in range(0, len(offsets), CHUNK))
    )


def _mapped(path: Path, dtype: "np.dtype[Any]") -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


# Results of reading large files, remembered as long as the files do not change


def state_of(paths: Iterable[Path]) -> State | None:
    """Return what changes whenever one of these files does; None if they are small or were changed a moment ago.

    It includes the time of the last change of the inode, which only the system sets.
    """
    statuses = [(str(path), path.stat()) for path in sorted(paths)]
    if sum(status.st_size for _, status in statuses) < LARGE:
        return None
    if max(status.st_ctime for _, status in statuses) > time.time() - RECENT:
        return None
    return [
        [name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
        for name, status in statuses
    ]


def recall(folder: Path, key: str, state: State | None) -> str | None:
    """Return the value that this user remembered in the folder for files in this state; None if there is none."""
    if state is None:
        return None
    entry = _read(folder).get(key)
    return str(entry["value"]) if isinstance(entry, dict) and entry.get("state") == state else None


def remember(folder: Path, key: str, state: State | None, value: str) -> None:
    """Remember a value that was computed while the files were in this state, unless the folder cannot be written."""
    if state is None:
        return
    with _lock, suppress(OSError):
        entries = _read(folder)
        entries.pop(key, None)
        entries[key] = {"state": state, "value": value}
        latest = dict(list(entries.items())[-MAX_ENTRIES:])
        write_atomically(_path(folder), json.dumps(latest).encode())


def _path(folder: Path) -> Path:
    return folder / f".states.{os.getuid()}.json"


def _read(folder: Path) -> dict[str, Any]:
    path = _path(folder)
    try:
        if path.lstat().st_uid != os.getuid():
            return {}
        entries = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
