"""Scores the hypotheses of a beam search, finds the best candidates of a step, and chooses which of them end and which
continue.

Shapes: A active sentences, W live hypotheses of each (1 at first, then K), K beam size, C candidates of each sentence,
N = A * W rows of a step, S source positions, V' the vocabulary padded to whole blocks; M numbers of each of B rows, X
chosen positions.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.translate.search import Flags, Ids
from nmt.translate.steps import BLOCK, Follower

LEAST_COVERAGE = 1e-6  # lower limit of a source token's summed attention, whose logarithm is taken
FEW = 2**14  # `pack_top` ranks up to this many numbers without blocks
_POSITION_BITS = 32
_POSITIONS = 2**_POSITION_BITS - 1
_IMPOSSIBLE = np.int64(np.float32(math.inf).view(np.int32)) << _POSITION_BITS

Fate = Literal["kept", "ended", "pruned"]


class Scorer(Follower):
    """Scores a finished hypothesis: its log-probability divided by a length penalty, which never decreases with the
    length, eos included: 1 (none), length^alpha (average) or ((5 + length) / 6)^alpha (gnmt, Wu et al. 2016, eq. 14).
    """

    def __init__(self, kind: Literal["none", "average", "gnmt"] = "none", alpha: float = 0.0) -> None:
        self.kind, self.alpha = kind, alpha

    def penalty(self, length: int) -> float:
        """Compute the divisor of the log-probability of a hypothesis of `length` tokens."""
        bases = {"none": 1.0, "average": length, "gnmt": (5 + length) / 6}
        return float(bases[self.kind] ** self.alpha)

    def attend(self, weights: Tensor | None) -> None:
        """Receive the attention weights (N, S) of the current step."""

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        """Score finished hypotheses of `length` tokens, which end in these rows and belong to these sentences."""
        divisor = self.penalty(length)
        return [log_prob / divisor for log_prob in log_probs]


class Coverage(Scorer):
    """Adds to the score of each finished hypothesis its coverage score, which is never above 0."""

    def __init__(self, plain: Scorer, strength: float, lengths: Sequence[int]) -> None:
        """plain: the scorer without coverage; strength: beta of Wu et al.; lengths: source tokens of each sentence."""
        super().__init__(plain.kind, plain.alpha)
        self._strength, self._lengths = strength, lengths
        self._sums: Tensor | None = None  # (N, S): sum of each live hypothesis's attention weights over its steps

    def attend(self, weights: Tensor | None) -> None:
        assert weights is not None  # `Translator.use_search` refuses a model without attention
        self._sums = weights.float() if self._sums is None else self._sums + weights

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        assert self._sums is not None
        self._sums = self._sums[torch.tensor(parents).to(self._sums.device, non_blocking=True)]

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        assert self._sums is not None
        sums = self._sums[torch.tensor(rows).to(self._sums.device)].cpu().numpy()
        # Each coverage score is computed alone and without padding, so that it does not depend on other sentences of
        # the batch, not even in the last bit.
        covered = [self.of(row[: self._lengths[s]]) for row, s in zip(sums, sentences, strict=True)]
        normalised = super().scores(sentences, rows, log_probs, length)
        return [score + self._strength * coverage for score, coverage in zip(normalised, covered, strict=True)]

    @staticmethod
    def of(attention: NDArray[np.float32]) -> float:
        """Compute sum_s log(min(max(a_s, 1e-6), 1)) over source tokens s, including </s>   (Wu et al. 2016, eq. 14).

        attention: (S,), a_s is the sum of the attention weights of source token s over all steps.
        """
        return float(np.log(np.clip(attention, LEAST_COVERAGE, 1.0)).sum(dtype=np.float64))


def pack_top(log_probs: Tensor, k: int, few: int = FEW) -> Tensor:
    """Find the k best values of each row, best first, packed with their positions: (B, M) float32 -> (B, k) int64. No
    value may be positive, and M must be a multiple of BLOCK. `Candidates.of` separates values and positions.

    Of equal values, which are common in bfloat16, the one at the lower position comes first. torch.topk leaves their
    order open, and on some devices it depends on the shape, so that batch mates could change a translation.
    """
    rows, columns = log_probs.shape
    if rows * columns <= few:
        return _pack(log_probs, torch.arange(columns, device=log_probs.device)).topk(k, largest=False).values
    blocks = log_probs.view(rows, columns // BLOCK, BLOCK)
    # The k best elements lie in the k blocks with the greatest maxima: if k other blocks rank before an element's
    # block, their k maxima rank before the element. So it suffices to rank the k * BLOCK elements of these blocks.
    first = torch.arange(0, columns, BLOCK, device=log_probs.device)
    top = _pack(blocks.amax(-1), first).topk(min(k, len(first)), largest=False, sorted=False).values
    starts = top & _POSITIONS
    positions = (starts[:, :, None] + torch.arange(BLOCK, device=log_probs.device)).flatten(1)
    return _pack(log_probs.gather(1, positions), positions).topk(k, largest=False).values


def pack_at(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Pack log-probabilities with their positions, as `pack_top` does: (B, M), positions (B, X) -> (B, X) int64."""
    return _pack(log_probs.gather(1, positions), positions)


def distinct(packed: Ids) -> Ids:
    """Sort packed numbers (B, X), best first, and replace repetitions by -inf, which comes last."""
    packed = np.sort(packed, axis=1)
    packed[:, 1:][packed[:, 1:] == packed[:, :-1]] = _IMPOSSIBLE
    return np.sort(packed, axis=1)


def _pack(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Combine each value and its position in one integer. A smaller integer means a greater value, or an equal value at
    a lower position."""
    # Non-negative floats have the same order as their bits, read as integers.
    return (log_probs.abs().view(torch.int32).long() << _POSITION_BITS) + positions


class Candidates(NamedTuple):
    """Hypotheses extended by one token, best first: (A, C). Impossible candidates have the log-probability -inf."""

    log_probs: NDArray[np.float32]  # log-probability of the extended hypothesis
    rows: Ids  # row of the hypothesis before the extension
    tokens: Ids  # token that extends the hypothesis

    @classmethod
    def of(cls, packed: Ids, width: int, vocabulary: int) -> Self:
        """Separate packed log-probabilities and positions (A, C) among the W * V' extensions of each sentence."""
        rows_of_sentence, tokens = np.divmod(packed & _POSITIONS, vocabulary)
        rows = rows_of_sentence + np.arange(0, len(packed) * width, width)[:, None]
        return cls(-(packed >> _POSITION_BITS).astype(np.int32).view(np.float32), rows, tokens)

    def at(self, *index: Any) -> Self:  # noqa: ANN401
        """Index all fields."""
        return type(self)(self.log_probs[index], self.rows[index], self.tokens[index])


class Selection(Follower):
    """Chooses which candidates of a step end and which continue. Of the K best candidates, those with eos end; the K
    best candidates without eos continue."""

    def __init__(self, beam_size: int, eos: int) -> None:
        self.beam_size, self.eos = beam_size, eos
        self.candidates = 2 * beam_size  # `choose` gets this many best candidates of each sentence

    def propose(self, totals: Tensor, part: slice) -> Tensor | None:
        """Propose candidates besides the best ones, packed as by `pack_top`: log-probabilities (A', W * V') of all
        extensions of the A' sentences in `part` -> (A', ...) or None."""
        return None

    def choose(self, candidates: Candidates) -> tuple[Flags, Candidates]:
        """Mark the candidates (A, C) that end, bool (A, C), and choose those that stay live, (A, K)."""
        ends = candidates.tokens == self.eos
        order = ends.argsort(axis=1, kind="stable")[:, : self.beam_size]
        possible = np.where(ends, np.float32(-math.inf), candidates.log_probs)
        sentences = np.arange(len(order))[:, None]
        log_probs, tokens = possible[sentences, order], candidates.tokens[sentences, order]
        # The token of an impossible candidate may lie in the vocabulary's padding, which has no embedding.
        tokens[~np.isfinite(log_probs)] = self.eos
        ends &= np.isfinite(candidates.log_probs)
        ends[:, self.beam_size :] = False
        return ends, Candidates(log_probs, candidates.rows[sentences, order], tokens)

    def rivals(self, live: Candidates) -> NDArray[np.float32]:
        """Return log-probabilities (A, K) of the live hypotheses, -inf for those that may not end yet."""
        return live.log_probs

    def keep(self, sentences: list[int]) -> None:
        """Drop all active sentences but these, which are indices below A."""


class Node(NamedTuple):
    """A candidate of one step: a hypothesis extended by one token."""

    parent: int | None  # index among the nodes of the previous step; None at the first step
    token: int
    log_prob: float  # natural logarithm of the probability of the extended hypothesis
    score: float  # log_prob over its length penalty, without coverage
    fate: Fate  # kept: in the beam after this step; ended: chose eos; pruned: neither


class TreeSelection(Selection):
    """Records the beam search of one sentence: `steps` lists the candidates of each step, the kept ones, best first,
    before the others."""

    def __init__(self, beam_size: int, eos: int, scorer: Scorer, shortlist: Sequence[int] | None) -> None:
        super().__init__(beam_size, eos)
        self._scorer, self._shortlist = scorer, shortlist
        self.steps: list[list[Node]] = []

    def choose(self, candidates: Candidates) -> tuple[Flags, Candidates]:
        ends, live = super().choose(candidates)
        kept = _triples(live)
        fates: list[tuple[tuple[float, int, int], Fate]] = [(triple, "kept") for triple in kept]
        for triple, ended in zip(_triples(candidates), ends[0].tolist(), strict=False):
            if triple not in kept:
                fates.append((triple, "ended" if ended else "pruned"))
        divisor, nodes = self._scorer.penalty(len(self.steps) + 1), []
        for (log_prob, row, token), fate in fates:
            token_id = token if self._shortlist is None else self._shortlist[token]
            nodes.append(Node(row if self.steps else None, token_id, log_prob, log_prob / divisor, fate))
        self.steps.append(nodes)
        return ends, live


def _triples(candidates: Candidates) -> list[tuple[float, int, int]]:
    """List log-probability, row and token of each possible candidate of the only sentence, best first."""
    log_probs, rows, tokens = (field[0].tolist() for field in candidates)
    return [triple for triple in zip(log_probs, rows, tokens, strict=True) if triple[0] > -math.inf]
