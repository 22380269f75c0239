"""Pairs that repeat, held-out text in the training text, targets that are their sources, text with the quotes of a CSV
file: counted as a corpus is read.

In bounded memory: 8 bytes a training pair, 24 more for a moment in the end, and some 200 a held-out pair.
"""

import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from nmt.data.corpus import Pair

EXAMPLES = 3  # numbers of pairs that are named


class Found(NamedTuple):
    """How many pairs there are of a kind, and the first of them."""

    total: int
    examples: list[int]

    def plus(self, number: int) -> "Found":
        """One pair more."""
        return Found(self.total + 1, [*self.examples, number][:EXAMPLES])


class Overlap:
    """Watches the splits of a corpus, the held-out ones before the training text."""

    def __init__(self) -> None:
        self._train = array.array("q")  # digests of pairs; of one that is dropped its number, which no other has
        self._held_out: dict[str, tuple[array.array[int], array.array[int]]] = {}  # digests of sources, and of pairs
        self._copies: dict[str, Found] = {}
        self._quoted: dict[str, Found] = {}
        self._in_train: set[int] = set()  # digests of held-out sources and pairs that the training text has too

    def watch(self, name: str, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """The pairs as they come."""
        train = name == "train"
        copies = quoted = Found(0, [])
        sources, whole = array.array("q"), self._train if train else array.array("q")
        wanted = {digest for split in self._held_out.values() for side in split for digest in side}
        for number, pair in enumerate(pairs, 1):
            source, target, _ = pair
            if source and target and source.strip() and target.strip():
                of_source, of_pair = hash(source), hash((source, target))
                if source == target:
                    copies = copies.plus(number)
                if _has_csv_quotes(source) or _has_csv_quotes(target):
                    quoted = quoted.plus(number)
                if train and (of_source in wanted or of_pair in wanted):
                    self._in_train |= {of_source, of_pair}
            else:
                of_source = of_pair = number
            whole.append(of_pair)
            if not train:
                sources.append(of_source)
            yield pair
        self._copies[name], self._quoted[name] = copies, quoted
        if not train:
            self._held_out[name] = sources, whole

    def copies(self, name: str) -> Found:
        """Pairs whose target is their source."""
        return self._copies[name]

    def quoted(self, name: str) -> Found:
        """Pairs with the quotes of a CSV file, such as "say ""hi""\"."""
        return self._quoted[name]

    def duplicates(self) -> Found:
        """Training pairs that repeat an earlier one; the examples are places of the first that is repeated."""
        digests = np.frombuffer(self._train, dtype=np.int64)
        ordered = np.sort(digests)
        repeats = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(repeats):
            return Found(0, [])
        at = np.minimum(np.searchsorted(repeats, digests), len(repeats) - 1)
        first = digests[np.argmax(repeats[at] == digests)]
        return Found(len(repeats), (np.flatnonzero(digests == first)[:EXAMPLES] + 1).tolist())

    def in_train(self, name: str) -> tuple[Found, Found]:
        """Pairs of a held-out split whose source, and which as a whole, the training text has too."""
        found = []
        for digests in self._held_out[name]:
            numbers = [number for number, digest in enumerate(digests, 1) if digest in self._in_train]
            found.append(Found(len(numbers), numbers[:EXAMPLES]))
        return found[0], found[1]


def _has_csv_quotes(text: str) -> bool:
    """Is it in quotes, and are those inside it doubled?"""
    inside = text[1:-1]
    return text[0] == text[-1] == '"' and '""' in inside and '"' not in inside.replace('""', "")
