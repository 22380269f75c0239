"""Warnings about a corpus: duplicates, copies, train-test overlap, CSV quotes, swapped or wrong languages."""

import array
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nmt.data.reading.sources import Pair, locate
from nmt.data.reading.text import is_blank

Array = NDArray[Any]

FACTOR = np.int64(-7046029254386353131)  # odd; makes a hash of a pair from those of its sides
HASHES = 2**22  # compared at a time
MAX_EXAMPLES = 3  # pairs named in a warning
WARNINGS = {  # the share of a split's pairs above which to warn, what these pairs do, and a remedy
    "duplicates": (0.1, "repeat an earlier pair"),
    "copies": (0.05, "have the same text on both sides"),
    "quoted": (0.001, 'have text quoted as in CSV ("say ""hi"""); the quotes are kept: use a .csv file or remove them'),
    "blank_sources": (0, "have no source text; nothing is translated there"),
    "blank_references": (0, "have no reference text; no translation of them can match"),
    "sources_in_train": (0.1, "have a source that is also in train"),
    "pairs_in_train": (0.01, "are also in train"),
}


class Matches(NamedTuple):
    """Number of pairs with some property, and the numbers of the first ones."""

    total: int = 0
    examples: tuple[int, ...] = ()

    def plus(self, numbers: Sequence[int]) -> "Matches":
        """The matches and those of the pairs with these numbers."""
        return Matches(self.total + len(numbers), (*self.examples, *numbers)[:MAX_EXAMPLES])


@dataclass(frozen=True)
class PairFacts:
    """What the warnings need to know of N consecutive pairs of a split."""

    numbers: range  # (N,) of the pairs in the split, from 1
    usable: Array  # bool (N,): both sides have text
    hashes: Array  # int64 (N, 2) of source and of pair, equal in all processes; the pair's number if it is not usable
    copies: list[int]  # numbers of pairs with the same text on both sides
    quoted: list[int]  # numbers of pairs with quotes as in CSV
    blank_sources: list[int]  # numbers of pairs without any visible character there
    blank_references: list[int]

    @classmethod
    def of(cls, pairs: Sequence[Pair], first: int) -> "PairFacts":
        """first: number of the first pair."""
        digests, usable = [], []
        copies, quoted = [], []
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
                if _has_csv_quotes(source) or _has_csv_quotes(target):
                    quoted.append(number)
            else:
                usable.append(False)
        numbers = range(first, first + len(pairs))
        hashes = np.repeat(np.asarray(numbers, dtype=np.int64), 2).reshape(-1, 2)
        sides = np.frombuffer(b"".join(digests), dtype="<i8").reshape(-1, 2)
        mask = np.array(usable, dtype=bool)
        hashes[mask, 0] = sides[:, 0]
        hashes[mask, 1] = sides[:, 0] * FACTOR + sides[:, 1]
        return cls(numbers, mask, hashes, copies, quoted, *blank)


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
        kinds = ("copies", "quoted") if name == "train" else ("copies", "quoted", "blank_sources", "blank_references")
        matches = self._matches.setdefault(name, dict.fromkeys(kinds, Matches()))
        for kind in kinds:
            matches[kind] = matches[kind].plus(getattr(facts, kind))
        if name != "train":
            self._held_out.setdefault(name, []).append(facts.hashes)
            return
        if self._sorted is None:
            chunks = [hashes.ravel() for split in self._held_out.values() for hashes in split]
            self._sorted = np.unique(np.concatenate(chunks))
        self._train.frombytes(facts.hashes[:, 1].tobytes())
        hashes = facts.hashes[facts.usable]
        nearest = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        self._in_train.update(hashes[(self._sorted[nearest] == hashes).any(axis=1)].ravel().tolist())

    def of(self, name: str) -> dict[str, Matches]:
        """Matches in a split, by the keys of WARNINGS. Call it after all splits were read."""
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
        """Training pairs that repeat an earlier one; the examples are all occurrences of the first repeated pair."""
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


def _has_csv_quotes(text: str) -> bool:
    """Is the text quoted, with the quotes inside doubled?"""
    inside = text[1:-1]
    return text[0] == text[-1] == '"' and '""' in inside and '"' not in inside.replace('""', "")


MAX_SAMPLE = 2_000  # pairs of a split that the classifier reads
MIN_SAMPLE = 10  # pairs that it needs
MAX_CHARACTERS = 300  # of a line that it reads
MIN_ACCURACY = 0.9  # on each side of the training text; below it the languages are too similar to tell apart
MAX_FOREIGN = 0.5  # share of a held-out side that may be classified as the other side, without a warning

Sample = Sequence[tuple[str, str]]


class SideClassifier:
    """Classifies lines as source or target: naive Bayes over character trigrams, with add-one smoothing."""

    def __init__(self, train: Sample) -> None:
        """Trains on every other pair and tests itself on the rest."""
        counts = [Counter(trigram for pair in train[::2] for trigram in _trigrams(pair[side])) for side in (0, 1)]
        vocabulary = counts[0] | counts[1]
        log_sizes = [math.log(count.total() + len(vocabulary)) if vocabulary else 0.0 for count in counts]
        self._log_odds = {  # log p(trigram | source) / p(trigram | target)
            trigram: math.log1p(counts[0][trigram]) - log_sizes[0] - math.log1p(counts[1][trigram]) + log_sizes[1]
            for trigram in vocabulary
        }
        self.reliable = len(train) >= MIN_SAMPLE and max(self._foreign_shares(train[1::2])) <= 1 - MIN_ACCURACY

    def problem(self, held_out: Sample) -> str | None:
        """A description of swapped sides or of a wrong language in a held-out split; None if there is neither."""
        if not self.reliable or len(held_out) < MIN_SAMPLE:
            return None
        foreign = [share > MAX_FOREIGN for share in self._foreign_shares(held_out)]
        if all(foreign):
            return "its sides look swapped: most sources read like train's targets, most targets like train's sources"
        for side, own, other in ((0, "sources", "targets"), (1, "targets", "sources")):
            if foreign[side]:
                return f"most of its {own} read like train's {other}; is it the right language?"
        return None

    def _foreign_shares(self, pairs: Sample) -> tuple[float, float]:
        """Share of the sources that are classified as targets, and of the targets classified as sources."""
        source, target = (
            sum(sign * sum(self._log_odds.get(trigram, 0.0) for trigram in _trigrams(pair[side])) < 0 for pair in pairs)
            for side, sign in ((0, 1), (1, -1))
        )
        return source / max(1, len(pairs)), target / max(1, len(pairs))


def _trigrams(line: str) -> Iterator[str]:
    text = f" {line[:MAX_CHARACTERS].lower()} "
    return (text[i : i + 3] for i in range(len(text) - 2))


def corpus_warnings(
    splits: Mapping[str, Iterable[Pair]],
    matches: Mapping[str, Mapping[str, Matches]],
    samples: Mapping[str, Sample],
    counts: Mapping[str, int],
) -> list[str]:
    """One line per warning. By split: pairs as read, matches of WARNINGS, some usable pairs and the number of all."""
    warnings = []
    for name, pairs in splits.items():
        for kind, (total, examples) in matches[name].items():
            max_share, text = WARNINGS[kind]
            if total > max_share * counts[name]:
                warnings.append(f"{name}: {total} of {counts[name]} pairs {text}, such as {locate(pairs, examples)}")
    classifier = SideClassifier(samples["train"])
    for name in (name for name in splits if name != "train"):
        if problem := classifier.problem(samples[name]):
            warnings.append(f"{name}: {problem} ({locate(splits[name], [1])} and following)")
    return warnings
