"""Phrases that translations must contain, as automata over their tokens.

Hypotheses that have met equally many constraint tokens form a bank, and the slots of the beam are divided among the
banks (Post and Vilar 2018). Each phrase has an automaton of Knuth, Morris and Pratt, so that phrases may overlap,
repeat or start alike, and all sentences advance together in a few array operations (Hu et al. 2019).

Shapes: A active sentences, W live hypotheses and C candidates of each sentence, P distinct phrases of a sentence, V
vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.translate.search import Flags, Ids
from nmt.translate.selection import Candidates, Selection, pack_at, pack_top
from nmt.translate.steps import Bans

Phrase = Sequence[int]

NO_TOKEN = -1  # stands for a token where there is none


class _State(NamedTuple):
    """A state of a phrase's automaton: how many of its tokens a hypothesis has met. A phrase that must occur n times
    has n copies, which are met one after the other."""

    expected: int  # the token that leads to the next state; NO_TOKEN if none does
    first: int  # the first token of the phrase; NO_TOKEN when the last copy is complete
    failure: int  # number of the state to continue from when another token than `expected` follows
    complete: bool  # whether a copy ends here; it counts only if the next token does not continue its last word
    satisfied: bool  # whether the phrase is met if the hypothesis ends here
    done: int  # number of tokens in all earlier copies
    matched: int  # number of tokens met of the current copy


class Automata:
    """The automata of all sentences' phrases, in one table of states.

    A phrase that is listed n times must occur n times: its automaton reads n copies, one after the other. An occurrence
    does not count if the next token continues its last word. `roots`, int64 (sentences, P), has the first state of each
    phrase; `totals`, int64 (sentences,), has the number of tokens of all constraints.
    """

    def __init__(self, constraints: Sequence[Sequence[Phrase]], boundary: Flags) -> None:
        """boundary: bool (V,), True for tokens that do not continue a word, including </s>."""
        self._boundary = boundary
        self._states = [_State(NO_TOKEN, NO_TOKEN, 0, complete=False, satisfied=True, done=0, matched=0)]
        counted = [Counter(map(tuple, phrases)) for phrases in constraints]
        self.roots = np.zeros((len(counted), max([1, *map(len, counted)])), np.int64)  # state 0 is always satisfied
        for roots, phrases in zip(self.roots, counted, strict=True):
            roots[: len(phrases)] = [self._add(phrase, times) for phrase, times in phrases.items()]
        self.totals = np.array([sum(len(p) * n for p, n in phrases.items()) for phrases in counted], np.int64)
        columns = [np.array(column) for column in zip(*self._states, strict=True)]
        self.expected, self.first, self._failure, self._complete, self.satisfied, self._done, self._matched = columns

    def _add(self, phrase: tuple[int, ...], times: int) -> int:
        """Append the states of a phrase that must occur `times` times, and return the number of the first state."""
        root, length, failures = len(self._states), len(phrase), _failure_function(phrase)
        for done in range(times):
            start, last = root + done * (length + 1), done == times - 1
            for matched in range(length):
                failure = start + (failures[matched] if matched else 0)
                self._states.append(_State(phrase[matched], phrase[0], failure, False, False, done * length, matched))
            first = NO_TOKEN if last else phrase[0]
            self._states.append(_State(NO_TOKEN, first, start + failures[length], True, last, done * length, length))
        end = len(self._states)
        self._states.append(_State(NO_TOKEN, NO_TOKEN, end, False, True, times * length, 0))
        return root

    def after(self, states: Ids, tokens: Ids) -> Ids:
        """Advance every automaton by one token: states (..., P), tokens (...) -> new states (..., P)."""
        tokens = tokens[..., None]
        # A token in the vocabulary's padding belongs to an impossible candidate, so that its result does not matter.
        boundary = self._boundary[np.minimum(tokens, len(self._boundary) - 1)]
        states = states + (self._complete[states] & boundary)
        while (stuck := (self.expected[states] != tokens) & (self._failure[states] != states)).any():
            states = np.where(stuck, self._failure[states], states)
        advanced: Ids = states + (self.expected[states] == tokens)
        return advanced

    def banks(self, states: Ids, totals: Ids) -> Ids:
        """Count the constraint tokens that each candidate has met: states (A, C, P), `totals` (A,) -> (A, C). Of the
        phrases met in part, only the longest part counts, so that its next token always leads to a higher bank."""
        met = self._done[states].sum(-1) + self._matched[states].max(-1)
        return np.where(self.satisfied[states].all(-1), totals[:, None], met)


def _failure_function(phrase: tuple[int, ...]) -> list[int]:
    """Compute, for each n, the length of the longest proper prefix of the first n tokens that is also their suffix
    (Knuth, Morris and Pratt 1977)."""
    failures, k = [0, 0], 0
    for token in phrase[1:]:
        while k and phrase[k] != token:
            k = failures[k]
        k += phrase[k] == token
        failures.append(k)
    return failures


def allocate_slots(banks: Ids, possible: Flags, totals: Ids, size: int) -> Ids:
    """Choose `size` candidates of each sentence, or all if there are fewer, and return their indices, ascending.

    banks: the bank of each candidate (A, C), best candidate first; possible: bool (A, C); totals: the highest bank of
    each sentence (A,). The slots are divided equally among the banks. Slots that a bank cannot fill go to the next
    lower bank, so that the highest bank with candidates has at least one slot. Slots that the lowest bank cannot fill
    go to the best candidates that are left.

    Example: 6 slots, a phrase of two tokens (totals 2), and candidates in the banks [0, 0, 0, 0, 0, 1, 0, 2]. Each bank
    has 2 slots. Bank 2 uses one for candidate 7 and passes one on. Bank 1 then has 3, uses one for candidate 5 and
    passes two on. Bank 0 uses its 4 slots for candidates 0 to 3. The result is [0, 1, 2, 3, 5, 7].
    """
    chosen = np.zeros_like(possible)
    spare = np.zeros_like(totals)  # slots that the next higher bank passes on
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
    """Divides the slots of the beam among the banks. A hypothesis that lacks a constraint can only end at the maximum
    length, and only if the sentence has no finished hypothesis with all constraints."""

    def __init__(self, beam_size: int, eos: int, constraints: Sequence[Sequence[Phrase]], boundary: Flags) -> None:
        """constraints: the phrases of each sentence, each with at least one token."""
        super().__init__(beam_size, eos)
        self._automata = Automata(constraints, boundary)
        self._totals = self._automata.totals
        self._states = self._automata.roots[:, None]  # (A, W, P): state of each live hypothesis for each phrase
        self._ended = np.zeros(len(constraints), np.bool_)  # (A,): whether a hypothesis with all constraints has ended

    def bans(self) -> Bans:
        """Ban eos for hypotheses that lack a phrase."""
        rows = np.flatnonzero(~self._automata.satisfied[self._states].all(-1)).tolist()
        return [(row, self.eos) for row in rows]

    def propose(self, totals: Tensor, part: slice) -> Tensor:
        """Propose 2 P + 2 extensions of each live hypothesis: the best one, eos, and for each of the P phrases its
        expected token and its first token, or eos again where there is none. Log-probabilities (A', W * V') of all
        extensions of the A' sentences in `part` -> (A', W * (2 P + 2)), packed as by `pack_top`."""
        states = self._states[part]
        sentences, width, _ = states.shape
        vocabulary = totals.shape[1] // width
        eos = np.full((sentences, width, 1), self.eos)
        tokens = np.concatenate([self._automata.expected[states], self._automata.first[states], eos], -1)
        starts = np.arange(0, width * vocabulary, vocabulary)  # (W,): where the extensions of each hypothesis begin
        positions = np.where(tokens == NO_TOKEN, self.eos, tokens) + starts[:, None]
        wanted = torch.from_numpy(positions.reshape(sentences, -1)).to(totals.device, non_blocking=True)
        best = pack_top(totals.view(-1, vocabulary), 1).view(sentences, width)
        offsets = torch.from_numpy(starts).to(totals.device, non_blocking=True)
        # The lowest bits of a packed number are the position, here within one hypothesis: an offset is simply added.
        return torch.cat([best + offsets, pack_at(totals, wanted)], 1)

    def choose(self, candidates: Candidates) -> tuple[Flags, Candidates]:
        log_probs, rows, tokens = candidates
        after = self._automata.after(self._states.reshape(-1, self._states.shape[-1])[rows], tokens)
        banks = self._automata.banks(after, self._totals)
        ends, possible = tokens == self.eos, np.isfinite(log_probs)
        ended = np.zeros_like(ends)
        np.put_along_axis(ended, allocate_slots(banks, possible, self._totals, self.beam_size), True, axis=1)
        ended &= ends & possible
        # At the maximum length, eos is forced even for hypotheses that lack a constraint.
        met = ended & (banks == self._totals[:, None])
        self._ended |= met.any(1)
        ended = np.where(self._ended[:, None], met, ended)
        order = allocate_slots(banks, possible & ~ends, self._totals, self.beam_size)
        sentences = np.arange(len(order))[:, None]
        live, chosen = np.where(ends, np.float32(-np.inf), log_probs)[sentences, order], tokens[sentences, order]
        chosen[~np.isfinite(live)] = self.eos
        best_first = (-live).argsort(axis=1, kind="stable")
        order = order[sentences, best_first]
        self._states = after[sentences, order]
        return ended, Candidates(live[sentences, best_first], rows[sentences, order], chosen[sentences, best_first])

    def rivals(self, live: Candidates) -> NDArray[np.float32]:
        complete = self._automata.satisfied[self._states].all(-1)
        return np.where(complete, live.log_probs, np.float32(-np.inf))

    def keep(self, sentences: list[int]) -> None:
        self._states, self._totals = self._states[sentences], self._totals[sentences]
        self._ended = self._ended[sentences]


def occurrences(tokens: Sequence[int], phrase: Phrase, boundary: Flags) -> int:
    """Count how often a translation, or the start of one, meets a phrase, as `Automata` does; occurrences do not
    overlap."""
    tokens, phrase, count, start = list(tokens), list(phrase), 0, 0
    while start + len(phrase) <= len(tokens):
        end = start + len(phrase)
        met = tokens[start:end] == phrase and (end == len(tokens) or bool(boundary[tokens[end]]))
        count += met
        start = end if met else start + 1
    return count
