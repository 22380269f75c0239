"""Beam search, batched over sentences and hypotheses.

`beam_search` is the loop. Followers vary it: a `Scorer` scores finished hypotheses, a `Selection` chooses which
candidates end and which continue, and a `Watch` bans tokens.

Shapes: A active sentences, W live hypotheses of each (1 at first, then K), K beam size, C candidates of each (2 K, and
those that the selection proposes), N = A * W rows of a step, S source positions, V vocabulary, V' the vocabulary padded
to whole blocks.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, Literal

import numpy as np
import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.model.seq2seq import StateT
from nmt.translate.constraints import Allocation
from nmt.translate.search import Flags, Hypothesis, Limits, Search, SearchBatch
from nmt.translate.selection import Candidates, Coverage, Node, Scorer, Selection, TreeSelection, distinct, pack_top
from nmt.translate.steps import Ending, Follower, History, LogProbs, Mask, watches

CACHED_NUMBERS = 2**20  # a CPU computes this many log-probabilities at a time: 4 MiB, which fit its cache


class BeamSearch(Search[schema.Beam]):
    """Keeps the K best hypotheses of each sentence at each step."""

    takes_constraints = True

    def __init__(self, settings: schema.Beam) -> None:
        super().__init__(settings)
        self.beam_size = settings.beam_size
        self._scorer = Scorer(settings.length_penalty, settings.alpha)

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        eos, guidance = batch.symbols.eos, batch.guidance
        selection = Selection(self.beam_size, eos)
        if any(guidance.constraints):
            selection = Allocation(self.beam_size, eos, guidance.constraints, guidance.boundary)
        return self._search_with(selection, batch, n)

    def tree(self, batch: SearchBatch[Any], n: int) -> tuple[list[list[Hypothesis]], list[list[Node]]]:
        """Search a batch of one sentence, and return the candidates of each step too."""
        selection = TreeSelection(self.beam_size, batch.symbols.eos, self._scorer, batch.shortlist)
        return self._search_with(selection, batch, n), selection.steps

    def _search_with(self, selection: Selection, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        scorer = self._scorer
        if self.settings.coverage_penalty:
            scorer = Coverage(scorer, self.settings.coverage_penalty, batch.lengths)
        return beam_search(batch, selection, n, scorer=scorer, stop=self.settings.stop)

    def check_nbest(self, n: int) -> None:
        if n > self.beam_size:
            raise UserError(f"nbest={n}: more than the beam of {self.beam_size}; set search.beam_size={n}")

    def score(self, log_prob: float, length: int, attention: Tensor | None) -> float:
        score = log_prob / self._scorer.penalty(length)
        if not self.settings.coverage_penalty or attention is None:
            return score
        return score + self.settings.coverage_penalty * Coverage.of(attention.sum(0).numpy())


@torch.no_grad()
def beam_search(
    batch: SearchBatch[StateT],
    selection: Selection,
    n_best: int = 1,
    *,
    scorer: Scorer,
    stop: Literal["beam", "exact"] = "beam",
    cached_numbers: int = CACHED_NUMBERS,
) -> list[list[Hypothesis]]:
    """Return up to `n_best` <= K distinct hypotheses per sentence, best first; fewer only if fewer have a probability
    above 0.

    The search of a sentence stops when no live hypothesis can score above the n-th best finished one. With `stop`
    "beam" it also stops when K hypotheses have finished and the best of them scores at least as high as the best live
    one does at its present length, both without coverage, although a longer live one might still overtake it.
    """
    limits, device = batch.limits, batch.device
    active = list(range(len(limits.max_lengths)))
    running = np.ones(len(active), bool)  # whether the search of each active sentence goes on
    history = History(batch)
    finished = _Finished(limits, scorer, n_best, selection.beam_size if stop == "beam" else math.inf)
    followers = [history, scorer, selection, *watches(batch)]
    expansion = _Expansion(batch, selection, followers, cached_numbers)
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
        if not running.all():
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


class _Expansion(Generic[StateT]):
    """The live hypotheses of a batch, which are extended step by step."""

    def __init__(
        self, batch: SearchBatch[StateT], selection: Selection, followers: Sequence[Follower], cached_numbers: int
    ) -> None:
        self._batch, self._selection, self._followers = batch, selection, followers
        self._cached_numbers, self._log_probs = cached_numbers, LogProbs(batch.symbols, batch.device)
        sentences = len(batch.limits.max_lengths)
        self._state, self._scores = batch.state, torch.zeros(sentences, 1, device=batch.device)
        self._tokens = torch.full((sentences,), batch.symbols.bos, device=batch.device)

    def expand(self, now: int, active: Sequence[int]) -> tuple[Candidates, Tensor, Tensor | None]:
        """Compute step `now`, counted from 0: the candidates, the log-probability (N,) of each live hypothesis before
        the step, and the attention weights (N, S), None without attention."""
        output = self._batch.step(self._tokens, self._state)
        self._state = output.state
        mask = Mask.of(self._batch, now, active, self._scores.shape[1], self._followers)
        return self._best(output.logits, mask), self._scores.flatten(), output.weights

    def _best(self, logits: Tensor, mask: Mask) -> Candidates:
        """Find the best candidates of each sentence and those that the selection proposes: logits (N, V)."""
        (sentences, width), vocabulary, packed, more = self._scores.shape, 0, [], None
        on_cpu = logits.device.type == "cpu"
        chunk = max(1, self._cached_numbers // (width * logits.shape[1])) if on_cpu else sentences
        for start in range(0, sentences, chunk):
            part, rows = slice(start, start + chunk), slice(start * width, (start + chunk) * width)
            log_probs = self._log_probs(logits[rows], mask.part(rows.start, rows.stop))
            vocabulary = log_probs.shape[1]
            totals = log_probs.view(-1, width, vocabulary).add_(self._scores[part, :, None]).flatten(1)
            top = pack_top(totals, min(self._selection.candidates, totals.shape[1]))
            more = self._selection.propose(totals, part)
            packed.append(top if more is None else torch.cat([top, more], 1))
        # The only synchronisation of a step: operations on the few candidates run on the CPU.
        best = (packed[0] if len(packed) == 1 else torch.cat(packed)).cpu().numpy()
        return Candidates.of(best if more is None else distinct(best), width, vocabulary)

    def follow(self, live: Candidates, remaining: Tensor | None) -> None:
        """Continue with the candidates (A, K) of the `remaining` sentences, int64 (A,); None if none is dropped."""
        device = self._batch.device
        parents = torch.from_numpy(live.rows.ravel()).to(device, non_blocking=True)
        self._state = self._state.branch(parents, remaining)
        self._tokens = torch.from_numpy(live.tokens.ravel()).to(device, non_blocking=True)
        self._scores = torch.from_numpy(live.log_probs).to(device, non_blocking=True)


class _Finished:
    """The finished hypotheses of every sentence."""

    def __init__(self, limits: Limits, scorer: Scorer, n_best: int, max_endings: float) -> None:
        """max_endings: from so many finished hypotheses on, the search of a sentence stops when the best of them scores
        at least as high as the best live one."""
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
        """Check if the search of a sentence must continue after step `now`, given the log-probability of its best live
        hypothesis, and of its best `rival`, the best live one that may end."""
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
        return bound > sorted((ending.score for ending in endings), reverse=True)[self._n_best - 1]

    def best(self) -> list[list[Ending]]:
        """Return the n best endings of every sentence, best first; of equal scores, the earlier ending comes first."""
        return [sorted(endings, key=lambda ending: -ending.score)[: self._n_best] for endings in self._endings]
