"""What is suspicious in a corpus without being broken: told in the report and in the log, and nothing is dropped."""

from collections.abc import Iterable, Mapping
from itertools import islice

from nmt.data.corpus import Pair, place
from nmt.data.overlap import Found, Overlap
from nmt.data.sides import SAMPLE, Sample, Sides
from nmt.data.writing import Raw

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
