"""Beam search under lexical constraints: phrases that every translation of a sentence must contain.

Hypotheses that have met equally many tokens of their constraints form a bank, and the slots of the beam are dealt out
to the banks (Post and Vilar 2018). Each phrase has an automaton of Knuth, Morris and Pratt, so that phrases may
overlap, repeat or start alike, and all sentences advance together in a few array operations (Hu et al. 2019).

Shapes: A active sentences, W live hypotheses in each, K beam size, C candidates, P distinct phrases of a sentence,
V vocabulary, V' padded vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.translate.search.log_probs import pack_at, pack_top
from nmt.translate.search.tree import Candidates

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Phrase = Sequence[int]


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

    def __init__(self, constraints: Sequence[Sequence[Phrase]], boundary: Mask) -> None:
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
        """(..., P) and the next token (...) -> (..., P)."""
        tokens = tokens[..., None]
        # A token in the vocabulary's padding belongs to an impossible candidate.
        boundary = self._boundary[np.minimum(tokens, len(self._boundary) - 1)]
        nodes = nodes + (self._complete[nodes] & boundary)
        while (stuck := (self.expected[nodes] != tokens) & (self._failure[nodes] != nodes)).any():
            nodes = np.where(stuck, self._failure[nodes], nodes)
        found: Ids = nodes + (self.expected[nodes] == tokens)
        return found

    def banks(self, nodes: Ids, totals: Ids) -> Ids:
        """(A, N, P) and all tokens of each sentence's constraints (A,) -> tokens met (A, N).

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


def allocate_slots(banks: Ids, possible: Mask, totals: Ids, size: int) -> Ids:
    """Choose `size` of the candidates of each sentence, or all if there are fewer: indices, ascending.

    banks: (A, C) of candidates, best first; possible: (A, C); totals: the highest bank (A,). Every bank has an equal
    share of the slots. What a bank cannot fill goes to the next lower one, so that the highest bank that has candidates
    keeps at least its best one; what the lowest cannot fill goes to the best candidates left.
    """
    sentences, candidates = banks.shape
    width = int(totals.max(initial=0)) + 1
    rank, counts = _ranks(np.where(possible, banks, width), width)
    depth = np.minimum(np.arange(width + 1), totals[:, None] + 1)  # from the lowest bank
    shares = np.diff(size * depth // (totals[:, None] + 1), axis=1)
    spare = np.cumsum((shares - counts)[:, ::-1], axis=1)
    spare = (spare - np.minimum(np.minimum.accumulate(spare, axis=1), 0))[:, ::-1]  # slots that each bank hands down
    handed = np.concatenate([spare[:, 1:], np.zeros((sentences, 1), np.int64)], 1)
    slots = np.concatenate([shares + handed - spare, np.zeros((sentences, 1), np.int64)], 1)  # none for impossible ones
    chosen = rank < np.take_along_axis(slots, np.where(possible, banks, width), 1)
    order = np.where(chosen, 0, np.where(possible, 1, 2)).argsort(axis=1, kind="stable")
    return np.sort(order[:, : min(size, candidates)], axis=1)


def _ranks(banks: Ids, width: int) -> tuple[Ids, Ids]:
    """Banks (A, C) up to `width` -> the rank of each candidate in its bank (A, C), and candidates of each bank but the
    last (A, width)."""
    sentences, candidates = banks.shape
    keys = (banks + (width + 1) * np.arange(sentences)[:, None]).ravel()
    counts = np.bincount(keys, minlength=sentences * (width + 1))
    order = keys.argsort(kind="stable")
    rank = np.empty_like(keys)
    rank[order] = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank.reshape(sentences, candidates), counts.reshape(sentences, width + 1)[:, :width]


class Allocation:
    """What the live hypotheses of the active sentences have met, and which candidates go on."""

    def __init__(self, constraints: Sequence[Sequence[Phrase]], boundary: Mask, eos: int, beam_size: int) -> None:
        """constraints: the phrases of each sentence, of one token or more; boundary: see `Automata`."""
        self._automata, self._eos, self._beam_size = Automata(constraints, boundary), eos, beam_size
        self._totals = self._automata.totals
        self._nodes = self._automata.roots[:, None]  # (A, W, P)
        self._ended = np.zeros(len(constraints), np.bool_)

    def unfinished(self) -> Ids:
        """The rows, of A * W, that may not end yet."""
        return np.flatnonzero(~self._automata.satisfied[self._nodes].all(-1))

    def propose(self, totals: Tensor, part: slice) -> Tensor:
        """Log-probabilities (A', W * V') of the extensions of some sentences -> packed candidates (A', ...): of each
        hypothesis the best extension, the end, and both the next and the first token of each phrase not met."""
        nodes = self._nodes[part]
        sentences, width, _ = nodes.shape
        size = totals.shape[1] // width
        tokens = np.concatenate([self._automata.expected[nodes], self._automata.first[nodes]], -1)
        tokens = np.concatenate([tokens, np.full((sentences, width, 1), -1)], -1)
        starts = np.arange(0, width * size, size)
        positions = np.where(tokens < 0, self._eos, tokens) + starts[:, None]
        best = pack_top(totals.view(-1, size), 1).view(sentences, width)
        offsets = torch.from_numpy(starts).to(totals.device, non_blocking=True)
        wanted = torch.from_numpy(positions.reshape(sentences, -1)).to(totals.device, non_blocking=True)
        return torch.cat([best + offsets, pack_at(totals, wanted)], 1)

    def choose(self, ranked: Candidates) -> tuple[Mask, Candidates]:
        """Candidates (A, C), best first -> those that end (A, C), and the next live hypotheses (A, K)."""
        log_probs, rows, tokens = ranked
        after = self._automata.after(self._nodes.reshape(-1, self._nodes.shape[-1])[rows], tokens)
        banks = self._automata.banks(after, self._totals)
        ends, possible = tokens == self._eos, np.isfinite(log_probs)
        ended = np.zeros_like(ends)
        np.put_along_axis(ended, allocate_slots(banks, possible, self._totals, self._beam_size), True, axis=1)
        ended &= ends & possible
        # Only at the limit of the length can one end that has not met all.
        met = ended & (banks == self._totals[:, None])
        self._ended |= met.any(1)
        ended = np.where(self._ended[:, None], met, ended)
        order = allocate_slots(banks, possible & ~ends, self._totals, self._beam_size)
        sentences = np.arange(len(order))[:, None]
        live, chosen = np.where(ends, np.float32(-np.inf), log_probs)[sentences, order], tokens[sentences, order]
        chosen[~np.isfinite(live)] = self._eos
        best_first = (-live).argsort(axis=1, kind="stable")
        order = order[sentences, best_first]
        self._nodes = after[sentences, order]
        return ended, Candidates(live[sentences, best_first], rows[sentences, order], chosen[sentences, best_first])

    def keep(self, sentences: list[int]) -> None:
        """Drop the other active sentences."""
        self._nodes, self._totals = self._nodes[sentences], self._totals[sentences]
        self._ended = self._ended[sentences]


def occurrences(tokens: Sequence[int], phrase: Phrase, boundary: Mask) -> int:
    """How often a phrase is met, one after the other, in tokens that a translation starts with or consists of."""
    tokens, phrase, found, start = list(tokens), list(phrase), 0, 0
    while start + len(phrase) <= len(tokens):
        end = start + len(phrase)
        met = tokens[start:end] == phrase and (end == len(tokens) or bool(boundary[tokens[end]]))
        found += met
        start = end if met else start + 1
    return found
