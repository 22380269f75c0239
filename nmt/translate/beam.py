"""Beam search, batched over sentences and hypotheses.

`beam_search` is the loop. An `Expansion` computes its steps. Followers vary it: a `Scorer` scores finished hypotheses,
a `Selection` chooses which candidates end and which continue, and those that `SearchBatch.rules` make ban tokens.

Shapes: A active sentences, W live hypotheses of each (1 at first, then K), K beam size, C candidates of each (2 K, and
those that the selection proposes), N = A * W rows of a step, S source positions, V' padded vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.model.seq2seq import StateT
from nmt.translate.expansion import CACHED_NUMBERS, Candidates, Expansion, RecordedSteps, Recorder, StepByStep
from nmt.translate.search import Ending, Flags, Follower, History, Hypothesis, Limits, Search, SearchBatch

LEAST_COVERAGE = 1e-6  # lower limit of a source token's summed attention, whose logarithm is taken
Fate = Literal["kept", "ended", "pruned"]


class Scorer(Follower):
    """Scores a finished hypothesis: its log-probability divided by a length penalty.

    The penalty of each `kind`, with alpha >= 0: 1 (none), length^alpha (average), ((5 + length) / 6)^alpha (gnmt,
    Wu et al. 2016, eq. 14). The length includes eos. No penalty decreases with the length.
    """

    def __init__(self, kind: Literal["none", "average", "gnmt"] = "none", alpha: float = 0.0) -> None:
        self.kind, self.alpha = kind, alpha

    def penalty(self, length: int) -> float:
        """Compute the length penalty of `length` tokens."""
        match self.kind:
            case "none":
                return 1.0
            case "average":
                return float(length**self.alpha)
            case "gnmt":
                return float(((5 + length) / 6) ** self.alpha)
        assert_never(self.kind)

    def attend(self, weights: Tensor | None) -> None:
        """Receive the attention weights (N, S) of the current step."""

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        """Score finished hypotheses of `length` tokens, which end in these rows and belong to these sentences."""
        divisor = self.penalty(length)
        return [log_prob / divisor for log_prob in log_probs]


class Selection(Follower):
    """Chooses which candidates of a step end and which continue. Of the K best candidates, those with eos end; the K
    best candidates without eos continue."""

    def __init__(self, beam_size: int, eos: int) -> None:
        self.beam_size, self.eos = beam_size, eos
        self.candidates = 2 * beam_size  # `choose` gets this many best candidates of each sentence

    def propose(self, totals: Tensor, part: slice) -> Tensor | None:
        """Propose candidates besides the best ones, packed as by `pack_top`: (A', W * V') -> (A', ...) or None.

        totals: log-probabilities of all extensions of the A' sentences in `part`.
        """
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


@torch.no_grad()
def beam_search(
    batch: SearchBatch[StateT],
    selection: Selection,
    n_best: int = 1,
    *,
    scorer: Scorer,
    stop: Literal["beam", "exact"] = "beam",
    recorder: Recorder | None = None,
    cached_numbers: int = CACHED_NUMBERS,
) -> list[list[Hypothesis]]:
    """Return up to `n_best` <= K distinct hypotheses per sentence, best first.

    The search of a sentence stops when no live hypothesis can score above the sentence's n-th best finished one. With
    `stop` "beam" it also stops when K hypotheses have finished and the best of them scores at least as high as the best
    live one does at its present length, both without coverage, although a live one might still overtake it. Fewer than
    `n_best` hypotheses are returned only if fewer have a probability above 0.

    recorder: records the steps; only for a plain `Selection` and a batch without `rules`.
    """
    limits, device = batch.limits, batch.device
    active = list(range(len(limits.max_lengths)))
    running = np.ones(len(active), bool)  # whether the search of each active sentence goes on
    history = History(batch)
    finished = _Finished(limits, scorer, n_best, selection.beam_size if stop == "beam" else math.inf)
    followers = [history, scorer, selection, *(make(len(active)) for make in batch.rules)]
    expansion: Expansion = StepByStep(batch, selection, followers, cached_numbers)
    if recorder is not None:
        expansion = RecordedSteps(batch, selection.beam_size, recorder)
    for now in range(max(limits.max_lengths, default=0)):
        candidates, totals, weights = expansion.expand(now, active)
        history.add(totals, weights)
        scorer.attend(weights)
        ends, live = selection.choose(candidates)
        ends &= running[:, None]
        finished.add(now, active, candidates, ends)
        best_live, best_rival = (
            np.fmax.reduce(log_probs, axis=1).tolist() for log_probs in (live.log_probs, selection.rivals(live))
        )
        for a in running.nonzero()[0].tolist():
            running[a] = finished.can_improve(now, active[a], best_live[a], best_rival[a])
        if not running.any():
            break
        remaining = None
        if expansion.drops_ended and not running.all():
            unfinished = running.nonzero()[0].tolist()
            remaining = torch.tensor(unfinished).to(device, non_blocking=True)
            active, running = [active[a] for a in unfinished], running[unfinished]
            live = live.at(unfinished)
            selection.keep(unfinished)
        parents, tokens = live.rows.ravel().tolist(), live.tokens.ravel().tolist()
        for follower in followers:
            follower.advance(parents, tokens)
        expansion.follow(live, remaining)
    return history.hypotheses(finished.best())


class _Finished:
    """The finished hypotheses of every sentence."""

    def __init__(self, limits: Limits, scorer: Scorer, n_best: int, max_endings: float) -> None:
        """max_endings: from this many finished hypotheses on, the search of a sentence stops when the best of them
        scores at least as high as the best live one."""
        self._scorer, self._n_best, self._max_endings = scorer, n_best, max_endings
        self._largest_divisors = [scorer.penalty(length) for length in limits.max_lengths]
        self._endings: list[list[Ending]] = [[] for _ in limits.max_lengths]

    def add(self, now: int, active: list[int], candidates: Candidates, ends: Flags) -> None:
        """Add the candidates (A, C) of step `now` that end."""
        if not ends.any():
            return
        sentences = [active[a] for a in ends.nonzero()[0].tolist()]
        rows, log_probs = candidates.rows[ends].tolist(), candidates.log_probs[ends].tolist()
        scores = self._scorer.scores(sentences, rows, log_probs, now + 1)
        for sentence, row, log_prob, score in zip(sentences, rows, log_probs, scores, strict=True):
            self._endings[sentence].append(Ending(now, row, log_prob, score))

    def can_improve(self, now: int, sentence: int, log_prob: float, rival: float) -> bool:
        """Check if the search of a sentence must continue after step `now`.

        log_prob: log-probability of its best live hypothesis; rival: log-probability of the best live one that may end.
        """
        endings, penalty = self._endings[sentence], self._scorer.penalty
        if len(endings) >= self._max_endings:
            best = max(ending.log_prob / penalty(ending.step + 1) for ending in endings)
            if rival / penalty(now + 1) <= best:
                return False
        # No live hypothesis can end with a higher score: log-probabilities are negative and only fall, no length
        # penalty is larger, and a coverage score is never above 0.
        bound = log_prob / self._largest_divisors[sentence]
        if len(endings) < self._n_best:
            return bound > -math.inf
        return bound > self._sorted(endings)[self._n_best - 1].score

    def best(self) -> list[list[Ending]]:
        """Return the n best endings of every sentence, best first; of equal scores, the earlier ending comes first."""
        return [self._sorted(endings)[: self._n_best] for endings in self._endings]

    @staticmethod
    def _sorted(endings: list[Ending]) -> list[Ending]:
        return sorted(endings, key=lambda ending: -ending.score)


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
        divisor = self._scorer.penalty(len(self.steps) + 1)
        self.steps.append(
            [
                Node(
                    row if self.steps else None,
                    token if self._shortlist is None else self._shortlist[token],
                    log_prob,
                    log_prob / divisor,
                    fate,
                )
                for (log_prob, row, token), fate in fates
            ]
        )
        return ends, live


def _triples(candidates: Candidates) -> list[tuple[float, int, int]]:
    """List log-probability, row and token of each possible candidate of the only sentence, best first."""
    log_probs, rows, tokens = (field[0].tolist() for field in candidates)
    return [triple for triple in zip(log_probs, rows, tokens, strict=True) if triple[0] > -math.inf]


class BeamSearch(Search[schema.Beam]):
    """Keeps the K best hypotheses of each sentence at each step."""

    takes_constraints = True

    def __init__(self, settings: schema.Beam) -> None:
        super().__init__(settings)
        self.beam_size = settings.beam_size
        self._scorer = Scorer(settings.length_penalty, settings.alpha)

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        make_selection = batch.selection or Selection
        return self._search_with(batch, make_selection(self.beam_size, batch.symbols.eos), n)

    def tree(self, batch: SearchBatch[Any], n: int) -> tuple[list[list[Hypothesis]], list[list[Node]]]:
        selection = TreeSelection(self.beam_size, batch.symbols.eos, self._scorer, batch.shortlist)
        return self._search_with(batch, selection, n), selection.steps

    def _search_with(self, batch: SearchBatch[Any], selection: Selection, n: int) -> list[list[Hypothesis]]:
        scorer = self._scorer
        if self.settings.coverage_penalty:
            scorer = Coverage(scorer, self.settings.coverage_penalty, batch.lengths)
        recorder = batch.recorder
        if not self.settings.cuda_graphs or type(selection) is not Selection or batch.rules:
            recorder = None
        return beam_search(batch, selection, n, scorer=scorer, stop=self.settings.stop, recorder=recorder)

    def check_nbest(self, n: int) -> None:
        if n > self.beam_size:
            raise UserError(f"nbest={n}: more than the beam of {self.beam_size}; set search.beam_size={n}")

    def score(self, log_prob: float, length: int, attention: Tensor | None) -> float:
        score = log_prob / self._scorer.penalty(length)
        if not self.settings.coverage_penalty or attention is None:
            return score
        return score + self.settings.coverage_penalty * coverage_score(attention.sum(0).numpy())
