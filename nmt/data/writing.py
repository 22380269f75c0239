"""Writing a prepared corpus, a part at a time: memory holds 16 bytes a pair and side."""

import array
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nmt.data.prepared import IDS

Row = tuple[str, str, str]  # source, target and word alignment of a usable pair, as they are kept until encoded


class Raw:
    """The usable pairs of a split, on disk."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.raw"

    def write(self, rows: Iterable[Row]) -> None:
        with self.path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{source}\n{target}\n{alignment}\n" for source, target, alignment in rows)

    def __iter__(self) -> Iterator[Row]:
        with self.path.open(encoding="utf-8", newline="\n") as file:
            lines = (line[:-1] for line in file)
            yield from zip(lines, lines, lines, strict=True)

    def chunks(self, pairs: int, characters: int) -> Iterator[list[Row]]:
        """Some pairs at a time, fewer where they are long."""
        chunk: list[Row] = []
        size = 0
        for row in self:
            chunk.append(row)
            size += len(row[0]) + len(row[1])
            if len(chunk) == pairs or size > characters:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def delete(self) -> None:
        self.path.unlink()


class SideWriter:
    """One side of a split being written."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.offsets, self._line_ends = array.array("q", [0]), array.array("q", [0])

    def add(self, ids: Sequence[Sequence[int]], lines: Sequence[str]) -> None:
        with (
            (self.directory / f"{self.name}.ids").open("ab") as id_file,
            (self.directory / f"{self.name}.txt").open("ab") as text_file,
        ):
            id_file.write(np.fromiter(itertools.chain.from_iterable(ids), dtype=IDS).tobytes())
            for sentence, line in zip(ids, lines, strict=True):
                text = line.encode("utf-8")
                text_file.write(text)
                self.offsets.append(self.offsets[-1] + len(sentence))
                self._line_ends.append(self._line_ends[-1] + len(text))

    def close(self) -> None:
        for name, values in (("offsets", self.offsets), ("lines", self._line_ends)):
            with (self.directory / f"{self.name}.{name}.npy").open("wb") as file:
                # Given a file, NumPy writes with C's functions, whose errors say nothing of a full disk.
                write = SimpleNamespace(write=file.write)
                np.lib.format.write_array(write, np.asarray(values))


class AlignmentWriter:
    """The word alignments of a split; leaves no file where there is not one."""

    def __init__(self, path: Path) -> None:
        self.path, self._any = path, False

    def add(self, lines: Sequence[str]) -> None:
        self._any = self._any or any(lines)
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)

    def close(self) -> None:
        if not self._any:
            self.path.unlink(missing_ok=True)
