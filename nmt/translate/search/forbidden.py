"""Phrases that no translation may contain, however they are segmented."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

Bans = tuple[list[int], list[int]]  # rows, and a token that may not follow in each
NOTHING: frozenset[str] = frozenset()
SPACE = "▁"
START = frozenset([SPACE])  # a space before the first token makes no difference to the text


class Forbidden:
    """An automaton over the pieces that spell the phrases; a state is a set of starts of phrases, as text.

    The token that would complete a phrase is banned.
    """

    def __init__(self, edges: Mapping[tuple[str, int], str], bans: Mapping[str, Sequence[int]]) -> None:
        """edges: text and token -> longer text; bans: text -> the tokens that would complete a phrase."""
        self._edges, self._bans = dict(edges), dict(bans)

    @classmethod
    def spelled(cls, phrases: Iterable[str], id_of: Callable[[str], int | None]) -> Self:
        """Phrases as joined pieces, and the token of a piece, None if there is none."""
        edges: dict[tuple[str, int], str] = {}
        bans: dict[str, list[int]] = {}
        for phrase in dict.fromkeys(phrases):
            reached = {0, 1} if phrase[:1] == SPACE else {0}
            for start in range(len(phrase)):
                if start not in reached:
                    continue
                for end in range(start + 1, len(phrase) + 1):
                    token = id_of(phrase[start:end])
                    if token is None:
                        continue
                    reached.add(end)
                    if end < len(phrase):
                        edges[phrase[:start], token] = phrase[:end]
                    else:
                        bans.setdefault(phrase[:start], []).append(token)
        return cls(edges, bans)

    @property
    def always(self) -> tuple[int, ...]:
        """Tokens that are a phrase by themselves."""
        return tuple(self._bans.get("", ()))

    def within(self, vocabulary: NDArray[np.int64]) -> Self:
        """The same for tokens that are counted within an ascending vocabulary."""
        position = {token: i for i, token in enumerate(vocabulary.tolist())}
        edges = {(text, position[t]): longer for (text, t), longer in self._edges.items() if t in position}
        bans = {text: [position[t] for t in tokens if t in position] for text, tokens in self._bans.items()}
        return type(self)(edges, bans)

    def after(self, state: frozenset[str], token: int) -> frozenset[str]:
        """The state after a token."""
        start = self._edges.get(("", token))
        if not state:
            return NOTHING if start is None else frozenset([start])
        texts = {self._edges.get((text, token)) for text in state} | {start}
        return frozenset(text for text in texts if text is not None)

    def banned(self, state: frozenset[str]) -> set[int]:
        """Tokens that may not follow, besides those that never may."""
        return {token for text in state for token in self._bans.get(text, ())}

    def contained(self, tokens: Iterable[int]) -> bool:
        """Whether these tokens, from the start of a translation, contain a phrase."""
        state = START
        for token in tokens:
            if token in self.always or token in self.banned(state):
                return True
            state = self.after(state, token)
        return False


class Watch:
    """The states of the rows of a search."""

    def __init__(self, forbidden: Forbidden, rows: int) -> None:
        self._forbidden = forbidden
        self._states = [START] * rows

    def bans(self) -> Bans:
        """The tokens that each row may not choose at the next step."""
        pairs = [(row, token) for row, state in enumerate(self._states) for token in self._forbidden.banned(state)]
        return [row for row, _ in pairs], [token for _, token in pairs]

    def advance(self, parents: Iterable[int], tokens: Iterable[int]) -> None:
        """Follow the search by one step: new row i extends row parents[i] by tokens[i]."""
        states, after = self._states, self._forbidden.after
        self._states = [after(states[parent], token) for parent, token in zip(parents, tokens, strict=True)]
