"""Unicode NFC as a normalisation rule of SentencePiece.

SentencePiece's own rules fold compatibility characters (NFKC): full-width punctuation becomes half-width, a zero-width
non-joiner becomes a space. On the target side a reader misses these.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from unicodedata import category, normalize

CHARACTERS = [chr(code) for code in range(0x30000)]  # no later character has a canonical decomposition
BYTE_ORDER_MARK = "\ufeff"


@cache
def nfc_rule() -> str:
    """The rule as a table for SentencePiece: what is replaced, a tab, its replacement; characters in hexadecimal.

    Every canonical spelling of a composed character becomes its NFC form. White space becomes a space. Control
    characters and byte order marks are dropped.
    """
    replacements: dict[str, str] = {}
    for decomposed, characters in _composed().items():
        spellings = [*_spellings(decomposed), *characters]
        replacements |= dict.fromkeys(spellings, normalize("NFC", decomposed))
    for char in CHARACTERS[1:]:  # a rule cannot replace NUL
        if char.isspace():
            replacements[char] = " "
        elif category(char) == "Cc" or char == BYTE_ORDER_MARK:
            replacements[char] = ""
    return "".join(f"{_hexadecimal(text)}\t{_hexadecimal(by)}\n" for text, by in replacements.items() if text != by)


@cache
def _composed() -> dict[str, list[str]]:
    """Canonical decompositions, each with the characters that have it."""
    composed = defaultdict(list)
    for char in CHARACTERS:
        if (decomposed := normalize("NFD", char)) != char:
            composed[decomposed].append(char)
    return dict(composed)


def _spellings(decomposed: str) -> Iterator[str]:
    """What is canonically equivalent: marks in other orders, the first of them composed with the base or not."""
    for order in map("".join, permutations(decomposed)):
        if normalize("NFD", order) == decomposed:
            for end in range(1, len(order) + 1):
                head, tail = order[:end], order[end:]
                for composed in [head, *_composed().get(normalize("NFD", head), [])]:
                    yield composed + tail


def _hexadecimal(text: str) -> str:
    return " ".join(f"{ord(char):X}" for char in text)
