"""The files of a prepared corpus: written chunk by chunk, read as memory-mapped arrays."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers
from nmt.system.files import reraise_if_system_error

FORMAT = 6  # part of the fingerprint: increase it when the format of the files changes
IDS = np.dtype("<i4")
OFFSETS = np.dtype("<i8")
# The files of a side: token ids, UTF-8 text, and where each sentence begins in both.
FILES: dict[str, "np.dtype[Any]"] = {"ids": IDS, "txt": np.dtype("u1"), "offsets": OFFSETS, "lines": OFFSETS}
SCAN_BYTES = 2**22  # bytes of text that are searched for line ends at a time

Array = NDArray[Any]


class PreparedCorpus:
    """A prepared corpus: its splits, tokenizers and report."""

    def __init__(self, directory: Path) -> None:
        """Open the corpus in a directory. Raises UserError if it is incomplete, OSError for an error of the system."""
        self.directory = directory
        try:
            self.report: dict[str, Any] = json.loads((directory / "report.json").read_bytes())
            self.fingerprint: str = self.report["fingerprint"]
            self.tokenizers = Tokenizers.load(directory, self.report["lowercase"])
            self.splits = {name: Split(directory, name) for name in self.report["splits"]}
        except (OSError, ValueError, LookupError) as error:
            reraise_if_system_error(error)
            raise UserError(f"{directory}: is not a complete prepared corpus ({error})") from None

    @property
    def held_out(self) -> list["Split"]:
        """Return all splits but train."""
        return [split for split in self.splits.values() if split.name != "train"]


class Split:
    """Both sides of a split and its gold word alignments, if any."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.source, self.target = Side(directory, f"{name}.source"), Side(directory, f"{name}.target")
        self._alignments = directory / f"{name}.alignments"

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def alignments(self) -> "Alignments | None":
        """Open the gold alignments: a Pharaoh line for each pair. None if the split has no alignments."""
        return Alignments(self._alignments) if self._alignments.exists() else None


class Side:
    """The N sentences of one language of a split, read by their index."""

    def __init__(self, directory: Path, name: str) -> None:
        """Map the files of this name. Raises OSError, ValueError or IndexError if they are missing or cut off."""
        self.tokens, self._text, self.offsets, self._line_ends = (
            _mapped(directory / f"{name}.{kind}", dtype) for kind, dtype in FILES.items()
        )
        if (self.offsets[-1], self._line_ends[-1]) != (len(self.tokens), len(self._text)):
            raise ValueError(f"{name} does not match its offsets")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths_of(self, indices: Array) -> Array:
        """Count the tokens, including </s>, of the sentences with these indices -> int64 (B,)."""
        lengths: Array = self.offsets[indices + 1] - self.offsets[indices]
        return lengths

    @property
    def lengths(self) -> Array:
        """Count the tokens, including </s>, of each sentence -> int32 (N,)."""
        lengths: Array = np.diff(self.offsets).astype(np.int32)
        return lengths

    def ids(self, index: int) -> Array:
        """Return the token ids of a sentence, with </s> at the end."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def line(self, index: int) -> str:
        """Return the raw text of a sentence."""
        return bytes(self._text[self._line_ends[index] : self._line_ends[index + 1]]).decode("utf-8")

    def lines(self) -> list[str]:
        """Return the raw text of all sentences."""
        return [self.line(index) for index in range(len(self))]


class Alignments:
    """The gold word alignments of a split: a Pharaoh line for each pair."""

    def __init__(self, path: Path) -> None:
        self._text = _mapped(path, np.dtype("u1"))
        blocks = range(0, len(self._text), SCAN_BYTES)
        ends = [first + np.flatnonzero(self._text[first : first + SCAN_BYTES] == ord("\n")) for first in blocks]
        self._ends = np.concatenate([np.full(1, -1), *ends])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return bytes(self._text[self._ends[index] + 1 : self._ends[index + 1]]).decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


def _mapped(path: Path, dtype: "np.dtype[Any]") -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


# Writing


class Sentences(NamedTuple):
    """N encoded sentences of one language."""

    ids: Array  # concatenated token ids of all sentences; each sentence ends with </s>
    lengths: Array  # (N,) number of tokens of each sentence
    text: bytes  # concatenated UTF-8 text of all sentences
    sizes: Array  # (N,) number of bytes of each sentence
    unknown: int  # number of unknown tokens


class SideWriter:
    """Writes the files of a `Side`, which grow chunk by chunk."""

    def __init__(self, directory: Path, name: str, stack: ExitStack) -> None:
        self._ids, self._text, self._offsets, self._lines = (
            stack.enter_context((directory / f"{name}.{kind}").open("wb")) for kind in FILES
        )
        for file in (self._offsets, self._lines):
            file.write(bytes(OFFSETS.itemsize))  # the first sentence starts at 0
        self.tokens = self.bytes = self.longest = self.unknown = 0

    def append(self, side: Sentences) -> None:
        """Write the next sentences."""
        self._ids.write(side.ids.tobytes())
        self._text.write(side.text)
        self._offsets.write((self.tokens + np.cumsum(side.lengths, dtype=OFFSETS)).tobytes())
        self._lines.write((self.bytes + np.cumsum(side.sizes, dtype=OFFSETS)).tobytes())
        self.tokens += len(side.ids)
        self.bytes += len(side.text)
        self.longest = max(self.longest, int(side.lengths.max(initial=0)))
        self.unknown += side.unknown
