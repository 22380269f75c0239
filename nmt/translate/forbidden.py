"""Phrases that no translation may contain, as an automaton over the texts of pieces."""

import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Self
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from nmt.data.tokenizer import SPACELESS
from nmt.data.word_alignment import WORD_START

NOTHING: frozenset[str] = frozenset()
START = frozenset([WORD_START])  # state before the first token: the space that a phrase starts with counts as read
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece of byte_fallback
LAST_CHARACTER = chr(sys.maxunicode)
HYPHENS, JOINERS = "-\u2010\u2011", "_\u200c\u200d"  # HYPHENS join words, JOINERS the letters of one word


def kind_of(character: str) -> str:
    """Return "w" for a letter, digit or mark, "c" for a letter of a script without spaces, "-" for a hyphen, " " for
    white space, and "." for any other sign."""
    if character in HYPHENS:
        return "-"
    if SPACELESS.match(character):
        return "c"
    if character.isalnum() or character in JOINERS or category(character).startswith("M"):
        return "w"
    return " " if character.isspace() else "."


class Forbidden:
    """Phrases that no translation may contain, however they are segmented into pieces.

    The state after some tokens is the set of all texts that they end with and that start a phrase, but are no whole
    phrase. A token that would complete a phrase is banned. A phrase may follow a space, as in "a dog", or a sign, as in
    "(dog". In a script without spaces it may stand anywhere.
    """

    def __init__(self, phrases: Iterable[str], vocabulary: Mapping[str, int]) -> None:
        """phrases: each the text of its joined pieces; vocabulary: piece -> token."""
        self._phrases = frozenset(phrases) - {"", WORD_START}
        self._starts = frozenset(phrase[:end] for phrase in self._phrases for end in range(1, len(phrase)))
        self._pieces = {token: piece for piece, token in vocabulary.items()}
        self._bans = self._completions(vocabulary)  # start of a phrase -> the tokens that complete a phrase
        self._begun: dict[int, frozenset[str]] = {}  # token -> the starts of phrases that its piece ends with
        always = []
        for piece, token in vocabulary.items():
            texts = [piece, *_endings(piece)]
            if begun := self._starts.intersection(texts):
                self._begun[token] = begun
            if any(map(self._completes, texts)):
                always.append(token)
        self.always = tuple(always)  # the tokens that contain a whole phrase, which are banned in every state

    def _completions(self, vocabulary: Mapping[str, int]) -> dict[str, list[int]]:
        bans: dict[str, list[int]] = {}
        pieces = sorted(vocabulary)
        for phrase in self._phrases:
            for end in range(1, len(phrase)):
                rest = phrase[end:]
                # The pieces that start with the rest of the phrase are neighbours in the sorted list.
                longer = pieces[bisect_left(pieces, rest) : bisect_left(pieces, rest + LAST_CHARACTER)]
                if tokens := [vocabulary[piece] for piece in longer if _ends_at(phrase, piece[len(rest) :])]:
                    bans.setdefault(phrase[:end], []).extend(tokens)
        return bans

    def _completes(self, text: str) -> bool:
        """Check if a text starts with a phrase."""
        for end in range(1, len(text) + 1):
            start = text[:end]
            if start in self._phrases and _ends_at(start, text[end:]):
                return True
            if start not in self._starts:
                return False
        return False

    def within(self, vocabulary: NDArray[np.int64]) -> Self:
        """Return a copy for a smaller vocabulary, such as a shortlist (token ids), in which a token is its position."""
        position = {token: i for i, token in enumerate(vocabulary.tolist())}
        other = copy(self)
        other._pieces = {i: self._pieces[token] for token, i in position.items() if token in self._pieces}
        other._bans = {text: [position[t] for t in tokens if t in position] for text, tokens in self._bans.items()}
        other._begun = {position[token]: begun for token, begun in self._begun.items() if token in position}
        other.always = tuple(position[token] for token in self.always if token in position)
        return other

    def after(self, state: frozenset[str], token: int) -> frozenset[str]:
        """Advance a state by one token."""
        begun, piece = self._begun.get(token, NOTHING), self._pieces.get(token)
        if not state or piece is None:
            return begun
        return begun.union(self._starts.intersection([text + piece for text in state]))

    def banned(self, state: frozenset[str]) -> set[int]:
        """Return the tokens that may not follow in this state, besides those of `always`."""
        return {token for text in state for token in self._bans.get(text, ())}

    def contained(self, tokens: Iterable[int]) -> bool:
        """Check if a translation that starts with these tokens contains a phrase."""
        state = START
        for token in tokens:
            if token in self.always or token in self.banned(state):
                return True
            state = self.after(state, token)
        return False


def _ends_at(phrase: str, rest: str) -> bool:
    """Check if a phrase is whole before the rest of a piece. A letter, digit or hyphen would make it part of a word."""
    return not rest or kind_of(rest[0]) == "." or SPACELESS.match(phrase) is not None


def _endings(piece: str) -> Iterator[str]:
    """Yield what follows each character of a piece. After a sign, a phrase may start as after a space."""
    if BYTE.fullmatch(piece):
        return
    for start, character in enumerate(piece, 1):
        if start < len(piece):
            yield piece[start:]
        if kind_of(character) == "." and character != WORD_START:
            yield WORD_START + piece[start:]
