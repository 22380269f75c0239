"""Aligned phrases of the demo corpus: how they are joined, and how the French is spelled where words meet."""

import functools
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

Links = tuple[tuple[int, int], ...]

# Before a vowel or a mute h; the corpus has no aspirated h.
BEFORE_VOWEL = {
    "le": "l'", "la": "l'", "ne": "n'", "de": "d'", "que": "qu'", "ce": "cet", "ma": "mon", "sa": "son",
}  # fmt: skip
CONTRACTIONS = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}


class Phrase(NamedTuple):
    """Words of both sides, links (English index, French index), and the French features others agree with."""

    english: tuple[str, ...]
    french: tuple[str, ...]
    links: Links
    feminine: bool = False
    plural: bool = False


def parse_links(pharaoh: str) -> Links:
    """ "0-0 1-2" -> ((0, 0), (1, 2))."""
    return tuple((int(i), int(j)) for i, j in (link.split("-") for link in pharaoh.split()))


@functools.cache
def phrase(english: str, french: str, links: str = "0-0", feminine: bool = False) -> Phrase:
    return Phrase(tuple(english.split()), tuple(french.split()), parse_links(links), feminine)


def join(phrases: Sequence[Phrase], order: Sequence[int] | None = None) -> Phrase:
    """One phrase from several: the English in the order given, the French in `order` (default: the same)."""
    starts = [0]
    for part in phrases:
        starts.append(starts[-1] + len(part.english))
    french: list[str] = []
    links: list[tuple[int, int]] = []
    for index in order or range(len(phrases)):
        links += [(starts[index] + i, len(french) + j) for i, j in phrases[index].links]
        french += phrases[index].french
    return Phrase(tuple(word for part in phrases for word in part.english), tuple(french), tuple(links))


def starts_with_vowel(french: str) -> bool:
    return unicodedata.normalize("NFD", french[0])[0].lower() in "aeiouhœ"


def spell(sentence: Phrase) -> Phrase:
    """Written French: "le" before a vowel becomes "l'", and "de le" otherwise contracts to "du"."""
    written: list[str] = []
    position: list[int] = []
    for word, following in zip(sentence.french, (*sentence.french[1:], "."), strict=True):
        spelled = BEFORE_VOWEL.get(word, word) if starts_with_vowel(following) else word
        if written and (written[-1], spelled) in CONTRACTIONS:
            written[-1] = CONTRACTIONS[written[-1], spelled]
        else:
            written.append(spelled)
        position.append(len(written) - 1)
    links = tuple(sorted({(i, position[j]) for i, j in sentence.links}))
    return sentence._replace(french=tuple(written), links=links)
