"""Warnings about a corpus: duplicates, copies, train-test overlap, CSV quotes, swapped or wrong languages."""

import array
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from nmt.data.corpus import Pair, place
from nmt.data.prepared import Raw

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


SAMPLE = 2_000  # pairs of a split that are looked at
MOST = 0.5  # share of a held-out split's lines from which on their side is in doubt
LEAST = 10  # of a held-out split, to say anything
SURE = 0.9  # share of training lines, on each side, whose side must be guessed right; else the sides are too alike
LONGEST = 300  # characters of a line that are looked at

Sample = Sequence[tuple[str, str]]


class Sides:
    """Guesses which side of the training text a line is of: naive Bayes with add-one smoothing."""

    def __init__(self, train: Sample) -> None:
        """Learns from every other pair, and tries itself on the rest."""
        counts = [Counter(trigram for pair in train[::2] for trigram in _trigrams(pair[side])) for side in (0, 1)]
        kinds = len(counts[0] | counts[1])
        sizes = [math.log(count.total() + kinds) if kinds else 0.0 for count in counts]
        self._odds = {  # logarithm of p(trigram | source) / p(trigram | target); 0 for one never seen
            trigram: math.log1p(counts[0][trigram]) - sizes[0] - math.log1p(counts[1][trigram]) + sizes[1]
            for trigram in counts[0] | counts[1]
        }
        self.sure = len(train) >= LEAST and max(self._strangers(train[1::2])) <= 1 - SURE

    def fault(self, held_out: Sample) -> str | None:
        """What is wrong with most lines of a held-out split, if anything is."""
        if not self.sure or len(held_out) < LEAST:
            return None
        strange = [share > MOST for share in self._strangers(held_out)]
        if all(strange):
            return "its sides look swapped: most sources read like train's targets, most targets like train's sources"
        for side, here, there in ((0, "sources", "targets"), (1, "targets", "sources")):
            if strange[side]:
                return f"most of its {here} read like train's {there}; is it the right language?"
        return None

    def _strangers(self, pairs: Sample) -> tuple[float, float]:
        """The shares of the sources and of the targets that read like the other side."""
        source, target = (
            sum(sign * sum(self._odds.get(trigram, 0.0) for trigram in _trigrams(pair[side])) < 0 for pair in pairs)
            for side, sign in ((0, 1), (1, -1))
        )
        return source / max(1, len(pairs)), target / max(1, len(pairs))


def _trigrams(line: str) -> Iterator[str]:
    text = f" {line[:LONGEST].lower()} "
    return (text[i : i + 3] for i in range(len(text) - 2))


MATTERS = {  # share of a split's pairs from which on it is worth a warning, and what is told
    "duplicates": (0.1, "repeat an earlier pair"),
    "copies": (0.05, "have the same text on both sides"),
    "quoted": (0.001, 'have text quoted as in CSV ("say ""hi"""), read as it stands; write a .csv, or do not quote'),
    "sources_in_train": (0.1, "have a source that train has too"),
    "pairs_in_train": (0.01, "are in train too"),
}


def counted(overlap: Overlap, name: str) -> dict[str, Found]:
    """What the report tells of a split, by the names of MATTERS."""
    found = {"copies": overlap.copies(name), "quoted": overlap.quoted(name)}
    if name == "train":
        return {"duplicates": overlap.duplicates(), **found}
    sources, pairs = overlap.in_train(name)
    return {**found, "sources_in_train": sources, "pairs_in_train": pairs}


def corpus_warnings(
    splits: Mapping[str, Iterable[Pair]],
    seen: Mapping[str, Mapping[str, Found]],
    raw: Mapping[str, Raw],
    kept: Mapping[str, int],
) -> list[str]:
    """A line for each thing that the user should look at. `seen` is what was counted of each split."""
    told = []
    for name, pairs in splits.items():
        for kind, found in seen[name].items():
            share, words = MATTERS[kind]
            if found.total > share * kept[name]:
                examples = place(pairs, found.examples)
                told.append(f"{name}: {found.total} of {kept[name]} pairs {words}, such as {examples}")
    sides = Sides(_sample(raw["train"], kept["train"]))
    for name in (name for name in splits if name != "train"):
        if fault := sides.fault(_sample(raw[name], kept[name])):
            told.append(f"{name}: {fault} ({place(splits[name], [1])} and following)")
    return told


def _sample(pairs: Raw, count: int) -> Sample:
    """Some pairs, from all over the split."""
    return [(source, target) for source, target, _ in islice(pairs, 0, None, -(-count // SAMPLE))]
