"""Scores the hypotheses of a beam search, and chooses which candidates of a step end and which continue.

Shapes: A active sentences, W live hypotheses of each (1 at first, then K), K beam size, C candidates of each sentence,
N = A * W rows of a step, S source positions, V' the vocabulary padded to whole blocks.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.translate.ranking import Ids, unpack
from nmt.translate.search import Flags
from nmt.translate.steps import Follower

LEAST_COVERAGE = 1e-6  # lower limit of a source token's summed attention, whose logarithm is taken
Fate = Literal["kept", "ended", "pruned"]


class Scorer(Follower):
    """Scores a finished hypothesis: its log-probability divided by a length penalty, which never decreases with the
    length, eos included: 1 (none), length^alpha (average) or ((5 + length) / 6)^alpha (gnmt, Wu et al. 2016, eq. 14).
    """

    def __init__(self, kind: Literal["none", "average", "gnmt"] = "none", alpha: float = 0.0) -> None:
        self.kind, self.alpha = kind, alpha

    def penalty(self, length: int) -> float:
        bases = {"none": 1.0, "average": length, "gnmt": (5 + length) / 6}
        return float(bases[self.kind] ** self.alpha)

    def attend(self, weights: Tensor | None) -> None:
        """Receive the attention weights (N, S) of the current step."""

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        """Score finished hypotheses of `length` tokens, which end in these rows and belong to these sentences."""
        divisor = self.penalty(length)
        return [log_prob / divisor for log_prob in log_probs]


def coverage_score(attention: NDArray[np.float32]) -> float:
    """Compute sum_s log(min(max(a_s, 1e-6), 1)) over source tokens s, including </s>   (Wu et al. 2016, eq. 14).

    attention: (S,), a_s is the sum of the attention weights of source token s over all steps.
    """
    return float(np.log(np.clip(attention, LEAST_COVERAGE, 1.0)).sum(dtype=np.float64))


class Coverage(Scorer):
    """Adds to the score of each finished hypothesis its coverage score, which is never above 0."""

    def __init__(self, plain: Scorer, strength: float, lengths: Sequence[int]) -> None:
        """plain: the scorer without coverage; strength: beta of Wu et al.; lengths: number of source tokens of each
        sentence."""
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
        covered = [coverage_score(row[: self._lengths[s]]) for row, s in zip(sums, sentences, strict=True)]
        normalised = super().scores(sentences, rows, log_probs, length)
        return [score + self._strength * coverage for score, coverage in zip(normalised, covered, strict=True)]


class Candidates(NamedTuple):
    """Hypotheses extended by one token, best first: (A, C). Impossible candidates have the log-probability -inf."""

    log_probs: NDArray[np.float32]  # log-probability of the extended hypothesis
    rows: Ids  # row of the hypothesis before the extension
    tokens: Ids  # token that extends the hypothesis

    @classmethod
    def of(cls, packed: Ids, width: int, vocabulary: int) -> Self:
        """Separate packed positions (A, C) among the W * V' extensions of each sentence."""
        log_probs, positions = (part.numpy() for part in unpack(torch.from_numpy(packed)))
        rows_of_sentence, tokens = np.divmod(positions, vocabulary)
        return cls(log_probs, rows_of_sentence + np.arange(0, len(packed) * width, width)[:, None], tokens)

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
    """Records the beam search of one sentence. `steps` lists the candidates of each step: the kept ones, best first,
    then the others."""

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
