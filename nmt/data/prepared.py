"""A prepared corpus, read back: token ids and raw lines as memory-mapped arrays. Needs NumPy only."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.data.tokenizer import Tokenizers

FORMAT = 1  # of the directory; another number is prepared anew
IDS = np.dtype("<i4")

Array = NDArray[Any]


class Side:
    """One language of one split: N sentences, by index."""

    def __init__(self, directory: Path, name: str) -> None:
        try:
            self.offsets: Array = np.load(directory / f"{name}.offsets.npy", mmap_mode="r", allow_pickle=False)
            self.line_ends: Array = np.load(directory / f"{name}.lines.npy", mmap_mode="r", allow_pickle=False)
            self.tokens: Array = _mapped(directory / f"{name}.ids", IDS)
            self._text: Array = _mapped(directory / f"{name}.txt", np.dtype("u1"))
        except (OSError, ValueError) as error:
            raise UserError(f"{directory}: the prepared corpus is incomplete ({error}); delete the folder") from None
        if self.offsets[-1] != len(self.tokens) or self.line_ends[-1] != len(self._text):
            raise UserError(f"{directory}: {name} does not match its offsets; delete the folder to prepare it anew")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """int64 (N,), tokens of each sentence, </s> counted."""
        return np.diff(self.offsets)

    def ids(self, index: int) -> Array:
        """Token ids of a sentence, </s> last."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def line(self, index: int) -> str:
        """The raw text of a sentence."""
        return bytes(self._text[self.line_ends[index] : self.line_ends[index + 1]]).decode("utf-8")

    def lines(self) -> list[str]:
        """The raw text of all sentences."""
        return [self.line(index) for index in range(len(self))]


class Alignments(Sequence[str]):
    """Gold word alignments of one split, in Pharaoh format: a line for each of N pairs, by index."""

    def __init__(self, path: Path) -> None:
        self._text = _mapped(path, np.dtype("u1"))
        self._ends = np.flatnonzero(self._text == ord("\n"))

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
        return bytes(self._text[start : self._ends[index]]).decode("utf-8")


class Split:
    """Both sides of one split, and gold word alignments where there are some."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.source, self.target = Side(directory, f"{name}.source"), Side(directory, f"{name}.target")
        self._alignments = directory / f"{name}.alignments"

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def alignments(self) -> Sequence[str] | None:
        """Gold alignments, a line for each pair, or None."""
        return Alignments(self._alignments) if self._alignments.exists() else None


class Prepared:
    """A prepared corpus: its splits, tokenizers and report."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError if the directory is not a complete prepared corpus of this format."""
        self.directory = directory
        try:
            self.report: dict[str, Any] = json.loads((directory / "report.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{directory}: is not a prepared corpus ({error})") from None
        self.fingerprint: str = self.report["fingerprint"]
        self.splits = {name: Split(directory, name) for name in self.report["splits"]}
        self.tokenizers = Tokenizers.load(directory, self.report["lowercase"])

    def __iter__(self) -> Iterator[Split]:
        return iter(self.splits.values())


def padded(sentences: Sequence[Array | Sequence[int]], pad: int) -> Array:
    """Sentences of different length -> int64 (N, longest), filled with `pad`."""
    lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
    filled = np.full((len(sentences), int(lengths.max(initial=0))), pad, dtype=np.int64)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = np.concatenate(sentences) if lengths.sum() else []
    return filled


def _mapped(path: Path, dtype: "np.dtype[Any]") -> Array:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
