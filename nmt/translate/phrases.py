"""Phrases that translations must or must not contain, as automata over their tokens.

Constraints (phrases that every translation of a sentence must contain): hypotheses that have met equally many of their
tokens form a bank, and the slots of the beam are divided among the banks (Post and Vilar 2018). Each phrase has an
automaton of Knuth, Morris and Pratt, so that phrases may overlap, repeat or start alike, and all sentences advance
together in a few array operations (Hu et al. 2019).

Shapes: A active sentences, W live hypotheses in each, K beam size, C candidates, P distinct phrases of a sentence,
V vocabulary, V' padded vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nmt.translate.beam import Candidates, Selection
from nmt.translate.search import Bans, Flags, Follower, Ids, pack_at, pack_top

Phrase = Sequence[int]
NOTHING: frozenset[str] = frozenset()
SPACE = "▁"
START = frozenset([SPACE])  # a space before the first token makes no difference to the text


class _Node(NamedTuple):
    """A number of tokens of a phrase that a hypothesis has met."""

    expected: int  # the next token; -1: none
    first: int  # the first token of the phrase; -1: no copy of it is left to start
    failure: int  # the node to go on from when another token follows
    complete: bool  # a whole copy, unless the next token continues its last word
    satisfied: bool  # the hypothesis may end here
    done: int  # tokens of earlier copies
    matched: int  # tokens of this copy


class Automata:
    """The phrases of all sentences, with a node for each number of tokens that a hypothesis has met.

    A phrase that is listed n times must occur n times, one after the other. It is met where no token follows that
    continues its last word. `roots`, int64 (sentences, P): the node of each phrase before the first token.
    """

    def __init__(self, constraints: Sequence[Sequence[Phrase]], boundary: Flags) -> None:
        """boundary: (V,), true for tokens that do not continue a word, </s> among them."""
        self._boundary = boundary
        self._nodes = [_Node(-1, -1, 0, complete=False, satisfied=True, done=0, matched=0)]
        counted = [Counter(map(tuple, phrases)) for phrases in constraints]
        self.roots = np.zeros((len(counted), max([1, *map(len, counted)])), np.int64)  # node 0: nothing to meet
        for roots, phrases in zip(self.roots, counted, strict=True):
            roots[: len(phrases)] = [self._add(phrase, times) for phrase, times in phrases.items()]
        self.totals = np.array([sum(len(p) * n for p, n in phrases.items()) for phrases in counted], np.int64)
        columns = [np.array(column) for column in zip(*self._nodes, strict=True)]
        self.expected, self.first, self._failure, self._complete, self.satisfied, self._done, self._matched = columns

    def _add(self, phrase: tuple[int, ...], times: int) -> int:
        """Append the nodes of a phrase; returns the first one."""
        root, length, failures = len(self._nodes), len(phrase), _failure_function(phrase)
        for copy in range(times):
            start, last = root + copy * (length + 1), copy == times - 1
            for matched in range(length):
                failure = start + (failures[matched] if matched else 0)
                self._nodes.append(_Node(phrase[matched], phrase[0], failure, False, False, copy * length, matched))
            first = -1 if last else phrase[0]
            self._nodes.append(_Node(-1, first, start + failures[length], True, last, copy * length, length))
        end = len(self._nodes)
        self._nodes.append(_Node(-1, -1, end, False, True, times * length, 0))
        return root

    def after(self, nodes: Ids, tokens: Ids) -> Ids:
        """Advance every automaton by one token: nodes (..., P), tokens (...) -> new nodes (..., P)."""
        tokens = tokens[..., None]
        # A token in the vocabulary's padding belongs to an impossible candidate.
        boundary = self._boundary[np.minimum(tokens, len(self._boundary) - 1)]
        nodes = nodes + (self._complete[nodes] & boundary)
        while (stuck := (self.expected[nodes] != tokens) & (self._failure[nodes] != nodes)).any():
            nodes = np.where(stuck, self._failure[nodes], nodes)
        advanced: Ids = nodes + (self.expected[nodes] == tokens)
        return advanced

    def banks(self, nodes: Ids, totals: Ids) -> Ids:
        """Count the tokens met: nodes (A, C, P), all tokens of each sentence's constraints (A,) -> (A, C).

        Of the phrases that are not met, only the longest start counts: its next token always leads to a higher bank.
        """
        met = self._done[nodes].sum(-1) + self._matched[nodes].max(-1)
        return np.where(self.satisfied[nodes].all(-1), totals[:, None], met)


def _failure_function(phrase: tuple[int, ...]) -> list[int]:
    """Entry n: the length of the longest proper prefix of the first n tokens that is also their suffix (Knuth, Morris
    and Pratt 1977)."""
    failures, k = [0, 0], 0
    for token in phrase[1:]:
        while k and phrase[k] != token:
            k = failures[k]
        k += phrase[k] == token
        failures.append(k)
    return failures


def allocate_slots(banks: Ids, possible: Flags, totals: Ids, size: int) -> Ids:
    """Choose `size` of the candidates of each sentence, or all if there are fewer: indices, ascending.

    banks: (A, C) of candidates, best first; possible: (A, C); totals: the highest bank (A,). Every bank has an equal
    share of the slots. What a bank cannot fill goes to the next lower one, so that the highest bank that has candidates
    keeps at least its best one; what the lowest cannot fill goes to the best candidates left.

    Example: 6 slots, a phrase of two tokens (totals 2), and candidates in the banks [0, 0, 0, 0, 0, 1, 0, 2]. Each bank
    has 2 slots. Bank 2 fills one with candidate 7 and leaves one; bank 1 fills one of 3 with candidate 5, leaves two;
    bank 0 fills its 4 with candidates 0 to 3. The result is [0, 1, 2, 3, 5, 7].
    """
    chosen = np.zeros_like(possible)
    spare = np.zeros_like(totals)  # slots that the bank above leaves over
    for bank in reversed(range(int(totals.max(initial=0)) + 1)):
        start, end = (size * np.minimum(b, totals + 1) // (totals + 1) for b in (bank, bank + 1))
        slots = end - start + spare
        members = possible & (banks == bank)
        place = members.cumsum(axis=1)
        chosen |= members & (place <= slots[:, None])
        spare = np.maximum(slots - place[:, -1], 0)
    order = np.where(chosen, 0, np.where(possible, 1, 2)).argsort(axis=1, kind="stable")
    return np.sort(order[:, : min(size, banks.shape[1])], axis=1)


class Allocation(Selection):
    """Divides the slots of the beam among the banks. No hypothesis ends before it has met all constraints, unless none
    does at the maximum length."""

    def __init__(self, beam_size: int, eos: int, constraints: Sequence[Sequence[Phrase]], boundary: Flags) -> None:
        """constraints: the phrases of each sentence, of one token or more; boundary: see `Automata`."""
        super().__init__(beam_size, eos)
        self._automata = Automata(constraints, boundary)
        self._totals = self._automata.totals
        self._nodes = self._automata.roots[:, None]  # (A, W, P), what the live hypotheses have met
        self._ended = np.zeros(len(constraints), np.bool_)  # has a hypothesis that meets all?

    def bans(self) -> Bans:
        """Ban the end of hypotheses that lack a phrase."""
        rows = np.flatnonzero(~self._automata.satisfied[self._nodes].all(-1)).tolist()
        return rows, [self.eos] * len(rows)

    def propose(self, totals: Tensor, part: slice) -> Tensor:
        """Propose of each hypothesis the best extension, the end, and both the next and the first token of each phrase
        not met."""
        nodes = self._nodes[part]
        sentences, width, _ = nodes.shape
        size = totals.shape[1] // width
        tokens = np.concatenate([self._automata.expected[nodes], self._automata.first[nodes]], -1)
        tokens = np.concatenate([tokens, np.full((sentences, width, 1), -1)], -1)
        starts = np.arange(0, width * size, size)
        positions = np.where(tokens < 0, self.eos, tokens) + starts[:, None]
        best = pack_top(totals.view(-1, size), 1).view(sentences, width)
        offsets = torch.from_numpy(starts).to(totals.device, non_blocking=True)
        wanted = torch.from_numpy(positions.reshape(sentences, -1)).to(totals.device, non_blocking=True)
        return torch.cat([best + offsets, pack_at(totals, wanted)], 1)

    def choose(self, candidates: Candidates) -> tuple[Flags, Candidates]:
        log_probs, rows, tokens = candidates
        after = self._automata.after(self._nodes.reshape(-1, self._nodes.shape[-1])[rows], tokens)
        banks = self._automata.banks(after, self._totals)
        ends, possible = tokens == self.eos, np.isfinite(log_probs)
        ended = np.zeros_like(ends)
        np.put_along_axis(ended, allocate_slots(banks, possible, self._totals, self.beam_size), True, axis=1)
        ended &= ends & possible
        # Only at the limit of the length can one end that has not met all.
        met = ended & (banks == self._totals[:, None])
        self._ended |= met.any(1)
        ended = np.where(self._ended[:, None], met, ended)
        order = allocate_slots(banks, possible & ~ends, self._totals, self.beam_size)
        sentences = np.arange(len(order))[:, None]
        live, chosen = np.where(ends, np.float32(-np.inf), log_probs)[sentences, order], tokens[sentences, order]
        chosen[~np.isfinite(live)] = self.eos
        best_first = (-live).argsort(axis=1, kind="stable")
        order = order[sentences, best_first]
        self._nodes = after[sentences, order]
        return ended, Candidates(live[sentences, best_first], rows[sentences, order], chosen[sentences, best_first])

    def keep(self, sentences: list[int]) -> None:
        self._nodes, self._totals = self._nodes[sentences], self._totals[sentences]
        self._ended = self._ended[sentences]


def occurrences(tokens: Sequence[int], phrase: Phrase, boundary: Flags) -> int:
    """Count how often a phrase is met, one after the other, in the tokens at the start of a translation or in all."""
    tokens, phrase, count, start = list(tokens), list(phrase), 0, 0
    while start + len(phrase) <= len(tokens):
        end = start + len(phrase)
        met = tokens[start:end] == phrase and (end == len(tokens) or bool(boundary[tokens[end]]))
        count += met
        start = end if met else start + 1
    return count


class Forbidden:
    """Phrases that no translation may contain, however they are segmented.

    An automaton over the pieces that spell the phrases; a state is a set of starts of phrases, as text. The token that
    would complete a phrase is banned.
    """

    def __init__(self, edges: Mapping[tuple[str, int], str], bans: Mapping[str, Sequence[int]]) -> None:
        """edges: text and token -> longer text; bans: text -> the tokens that would complete a phrase."""
        self._edges, self._bans = dict(edges), dict(bans)

    @classmethod
    def spelled(cls, phrases: Iterable[str], id_of: Callable[[str], int | None]) -> Self:
        """Make the automaton of phrases, given as joined pieces; id_of: returns the token of a piece, if any."""
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
        """Return the tokens that are a phrase by themselves."""
        return tuple(self._bans.get("", ()))

    def within(self, vocabulary: Ids) -> Self:
        """Number the tokens by their positions in an ascending vocabulary."""
        position = {token: i for i, token in enumerate(vocabulary.tolist())}
        edges = {(text, position[t]): longer for (text, t), longer in self._edges.items() if t in position}
        bans = {text: [position[t] for t in tokens if t in position] for text, tokens in self._bans.items()}
        return type(self)(edges, bans)

    def after(self, state: frozenset[str], token: int) -> frozenset[str]:
        """Advance a state by one token."""
        start = self._edges.get(("", token))
        if not state:
            return NOTHING if start is None else frozenset([start])
        texts = {self._edges.get((text, token)) for text in state} | {start}
        return frozenset(text for text in texts if text is not None)

    def banned(self, state: frozenset[str]) -> set[int]:
        """Return the tokens that may not follow, besides those that never may."""
        return {token for text in state for token in self._bans.get(text, ())}

    def contained(self, tokens: Iterable[int]) -> bool:
        """Do these tokens, from the start of a translation, contain a phrase?"""
        state = START
        for token in tokens:
            if token in self.always or token in self.banned(state):
                return True
            state = self.after(state, token)
        return False


class Watch(Follower):
    """Bans forbidden phrases in a search."""

    def __init__(self, forbidden: Forbidden, rows: int) -> None:
        self._forbidden = forbidden
        self._states = [START] * rows

    def bans(self) -> Bans:
        """Ban the tokens that would complete a phrase."""
        pairs = [(row, token) for row, state in enumerate(self._states) for token in self._forbidden.banned(state)]
        return [row for row, _ in pairs], [token for _, token in pairs]

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        states, after = self._states, self._forbidden.after
        self._states = [after(states[parent], token) for parent, token in zip(parents, tokens, strict=True)]
