"""What all searches do at each step: mask what may not follow, compute log-probabilities, and keep back-pointers.

Shapes: N hypotheses (the rows of a step), S source positions, T target positions, V vocabulary, V' the vocabulary
padded to whole blocks.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nmt.translate.forbidden import START, Forbidden
from nmt.translate.search import Hypothesis, SearchBatch, Symbols

BLOCK = 64  # the vocabulary is padded to a multiple of this: `pack_top` ranks so many columns at once
Bans = list[tuple[int, int]]
"""Pairs of a row and a token that may not follow the hypothesis in this row."""


class Follower:
    """Keeps something for each live hypothesis (row) of a search, and is told at each step which row extends which."""

    def bans(self) -> Bans:
        """Return which tokens may not follow at the next step, such as the last token of a forbidden phrase."""
        return []

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue with the rows of the next step: new row i extends row parents[i] by tokens[i]."""


class Watch(Follower):
    """Bans forbidden phrases in a search."""

    def __init__(self, forbidden: Forbidden, rows: int) -> None:
        self._forbidden = forbidden
        self._states = [START] * rows

    def bans(self) -> Bans:
        return [(row, token) for row, state in enumerate(self._states) for token in self._forbidden.banned(state)]

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        states, after = self._states, self._forbidden.after
        self._states = [after(states[parent], token) for parent, token in zip(parents, tokens, strict=True)]


def watches(batch: SearchBatch[Any]) -> list[Follower]:
    """Make the followers that ban what the user forbids, before the first step."""
    forbidden = batch.guidance.forbidden
    return [] if forbidden is None else [Watch(forbidden, len(batch.limits.max_lengths))]


class Mask(NamedTuple):
    """The tokens that may follow each of N hypotheses at one step."""

    may_end: bool  # whether hypotheses have the minimum length, so that eos may follow
    forced: list[int | None]  # the token that must follow each row, even if it is banned; None where several may
    bans: Bans

    @classmethod
    def of(
        cls, batch: SearchBatch[Any], step: int, sentences: Sequence[int], width: int, followers: Sequence[Follower]
    ) -> "Mask":
        """Make the mask of a step, counted from 0, for `width` hypotheses of each of these sentences."""
        eos, limits = batch.symbols.eos, batch.limits
        forced = [token for s in sentences for token in [limits.forced(step, s, eos)] * width]
        return cls(step >= limits.min_length, forced, [ban for follower in followers for ban in follower.bans()])

    def part(self, start: int, end: int) -> "Mask":
        """Select the rows from `start` up to `end`."""
        bans = [(row - start, token) for row, token in self.bans if start <= row < end]
        return Mask(self.may_end, self.forced[start:end], bans)


class LogProbs:
    """Computes masked log-probabilities in one reused buffer: a result is valid until the next call, and the caller may
    overwrite it."""

    def __init__(self, symbols: Symbols, device: torch.device) -> None:
        assert symbols.eos not in symbols.banned
        self._eos = symbols.eos
        self._banned = torch.tensor(symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self._buffer = torch.empty(0, 0, device=device)

    def __call__(self, logits: Tensor, mask: Mask) -> Tensor:
        """Compute log-probabilities, -inf for tokens that may not follow and for padding: logits (N, V) -> (N, V')
        float32. Masking does not renormalise the other tokens."""
        rows, vocabulary = logits.shape
        if len(self._buffer) < rows:
            columns = -(-vocabulary // BLOCK) * BLOCK
            self._buffer = torch.full((rows, columns), -math.inf, device=logits.device)
        log_probs = self._buffer[:rows]
        torch.log_softmax(logits, -1, dtype=torch.float32, out=log_probs[:, :vocabulary])
        forced = [(row, token) for row, token in enumerate(mask.forced) if token is not None]
        index = torch.tensor(forced, dtype=torch.int64).view(-1, 2).to(log_probs.device, non_blocking=True).unbind(1)
        unmasked = log_probs[index] if forced else None
        log_probs.index_fill_(1, self._banned, -math.inf)
        if not mask.may_end:
            log_probs[:, self._eos].fill_(-math.inf)
        if mask.bans:
            log_probs[torch.tensor(mask.bans).to(log_probs.device, non_blocking=True).unbind(1)] = -math.inf
        if unmasked is not None:
            log_probs.index_fill_(0, index[0], -math.inf)
            log_probs[index] = unmasked
        return log_probs


class Ending(NamedTuple):
    """A finished hypothesis in a `History`. Eos was chosen at this step, counted from 0, in this row."""

    step: int
    row: int
    log_prob: float
    score: float


class History(Follower):
    """Back-pointers: records token, parent row, log-probability and attention of every row at every step, so that a
    step costs the same however long the hypotheses are. After the search, `hypotheses` follows the pointers."""

    def __init__(self, batch: SearchBatch[Any]) -> None:
        self._eos, self._shortlist = batch.symbols.eos, batch.shortlist
        self._tokens: list[Sequence[int]] = []
        self._parents: list[Sequence[int]] = []
        self._weights: list[Tensor] = []
        self._totals: list[Tensor] = []

    def add(self, totals: Tensor, weights: Tensor | None) -> None:
        """Record the current step: the log-probabilities (N,) of the hypotheses before their tokens of this step, and
        the attention weights (N, S) of this step."""
        self._totals.append(totals)
        if weights is not None:
            self._weights.append(weights)

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        self._parents.append(parents)
        self._tokens.append(tokens)

    def hypotheses(self, endings: list[list[Ending]]) -> list[list[Hypothesis]]:
        """Return a hypothesis for each ending of each sentence, in the same order."""
        paths = [self._path(ending) for sentence in endings for ending in sentence]
        totals = [part.tolist() for part in _rows_of_paths(paths, self._totals)]
        weights = _rows_of_paths(paths, self._weights) if self._weights else [None] * len(paths)
        results = zip(paths, totals, weights, strict=True)
        return [[self._hypothesis(ending, *next(results)) for ending in sentence] for sentence in endings]

    def _path(self, ending: Ending) -> list[int]:
        """Find the row of a finished hypothesis at each step, from step 0 to the last."""
        path = [ending.row]
        for parents in reversed(self._parents[: ending.step]):
            path.append(parents[path[-1]])
        return path[::-1]

    def _hypothesis(self, ending: Ending, path: list[int], totals: list[float], attention: Tensor | None) -> Hypothesis:
        # self._tokens[t] has the tokens chosen at step t, in the order of the rows of step t + 1.
        tokens = [step[row] for step, row in zip(self._tokens, path[1:], strict=False)] + [self._eos]
        if self._shortlist is not None:
            tokens = [self._shortlist[token] for token in tokens]
        log_probs = [after - before for before, after in pairwise([*totals, ending.log_prob])]
        return Hypothesis(tokens, ending.score, ending.log_prob, attention, log_probs)


def _rows_of_paths(paths: list[list[int]], steps: list[Tensor]) -> list[Tensor]:
    """Collect the rows of each path, in one transfer from the device: (N, ...) of every step -> (T, ...) float32 on the
    CPU for every path."""
    if not paths:
        return []
    offsets = list(accumulate((len(step) for step in steps), initial=0))
    index = [offset + row for path in paths for offset, row in zip(offsets, path, strict=False)]
    joined = torch.cat(steps)
    rows = joined[torch.tensor(index).to(joined.device, non_blocking=True)].float().cpu()
    return list(torch.split(rows, [len(path) for path in paths]))
