"""Warnings about a corpus: duplicates, copies, train-test overlap, CSV quotes, swapped or wrong languages."""

import array
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from nmt.data.corpus import Pair, locate
from nmt.data.prepared import Row

MAX_EXAMPLES = 3  # pairs named in a warning
WARNINGS = {  # the share of a split's pairs above which to warn, what these pairs do, and a remedy
    "duplicates": (0.1, "repeat an earlier pair"),
    "copies": (0.05, "have the same text on both sides"),
    "quoted": (0.001, 'have text quoted as in CSV ("say ""hi"""); the quotes are kept: use a .csv file or remove them'),
    "sources_in_train": (0.1, "have a source that is also in train"),
    "pairs_in_train": (0.01, "are also in train"),
}


class Matches(NamedTuple):
    """Number of pairs with some property, and the numbers of the first ones."""

    total: int = 0
    examples: tuple[int, ...] = ()

    def plus(self, number: int) -> "Matches":
        return Matches(self.total + 1, (*self.examples, number)[:MAX_EXAMPLES])


class PairStatistics:
    """Counts the pairs that each of WARNINGS is about, while the splits are read, train last.

    Needs 8 bytes per training pair (32 for a moment at the end) and about 200 per held-out pair.
    """

    def __init__(self) -> None:
        self._train = array.array("q")  # hash of each pair, or its number for a pair that is dropped
        self._held_out: dict[str, tuple[array.array[int], array.array[int]]] = {}  # hashes of sources and of pairs
        self._matches: dict[str, dict[str, Matches]] = {}
        self._in_train: set[int] = set()  # hashes of held-out sources and pairs that train contains too

    def watch(self, name: str, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yields the pairs of a split and counts them."""
        train = name == "train"
        copies = quoted = Matches()
        source_hashes, pair_hashes = array.array("q"), self._train if train else array.array("q")
        held_out = {value for split in self._held_out.values() for side in split for value in side}
        for number, pair in enumerate(pairs, 1):
            source, target, _ = pair
            if source and target and source.strip() and target.strip():
                source_hash, pair_hash = hash(source), hash((source, target))
                if source == target:
                    copies = copies.plus(number)
                if _has_csv_quotes(source) or _has_csv_quotes(target):
                    quoted = quoted.plus(number)
                if train and (source_hash in held_out or pair_hash in held_out):
                    self._in_train |= {source_hash, pair_hash}
            else:
                source_hash = pair_hash = number
            pair_hashes.append(pair_hash)
            if not train:
                source_hashes.append(source_hash)
            yield pair
        self._matches[name] = {"copies": copies, "quoted": quoted}
        if not train:
            self._held_out[name] = source_hashes, pair_hashes

    def of(self, name: str) -> dict[str, Matches]:
        """Matches in a split, by the keys of WARNINGS. Call it after all splits were read."""
        if name == "train":
            return {"duplicates": self._duplicates(), **self._matches[name]}
        matches = dict(self._matches[name])
        for kind, hashes in zip(("sources_in_train", "pairs_in_train"), self._held_out[name], strict=True):
            numbers = [number for number, value in enumerate(hashes, 1) if value in self._in_train]
            matches[kind] = Matches(len(numbers), tuple(numbers[:MAX_EXAMPLES]))
        return matches

    def _duplicates(self) -> Matches:
        """Training pairs that repeat an earlier one; the examples are all occurrences of the first repeated pair."""
        hashes = np.frombuffer(self._train, dtype=np.int64)
        ordered = np.sort(hashes)
        repeats = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(repeats):
            return Matches()
        nearest = np.minimum(np.searchsorted(repeats, hashes), len(repeats) - 1)
        first = hashes[np.argmax(repeats[nearest] == hashes)]
        return Matches(len(repeats), tuple((np.flatnonzero(hashes == first)[:MAX_EXAMPLES] + 1).tolist()))


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
    usable: Mapping[str, Iterable[Row]],
    counts: Mapping[str, int],
) -> list[str]:
    """One line per warning. By split: pairs as read, matches of WARNINGS, usable pairs and their number."""
    warnings = []
    for name, pairs in splits.items():
        for kind, (total, examples) in matches[name].items():
            max_share, text = WARNINGS[kind]
            if total > max_share * counts[name]:
                warnings.append(f"{name}: {total} of {counts[name]} pairs {text}, such as {locate(pairs, examples)}")
    samples = {  # spread over the split
        name: [(source, target) for source, target, _ in islice(rows, 0, None, -(-counts[name] // MAX_SAMPLE))]
        for name, rows in usable.items()
    }
    classifier = SideClassifier(samples["train"])
    for name in (name for name in splits if name != "train"):
        if problem := classifier.problem(samples[name]):
            warnings.append(f"{name}: {problem} ({locate(splits[name], [1])} and following)")
    return warnings
