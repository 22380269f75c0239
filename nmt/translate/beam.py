"""Beam search, batched over sentences and hypotheses.

`beam_search` is the loop. What changes it attaches from outside: a `Scorer` scores finished hypotheses, a `Selection`
chooses which candidates end and which continue, and the batch's rules ban tokens. All of them follow the search.

Shapes: A active sentences, W live hypotheses in each (1 at first, then K), K beam size, C candidates (2K),
N = A * W rows of a step, S source positions, V' padded vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.model.decoder import StateT
from nmt.translate.search import (
    Ending,
    Flags,
    Follower,
    History,
    Hypothesis,
    Ids,
    Limits,
    LogProbs,
    Mask,
    Search,
    SearchBatch,
    distinct,
    pack_top,
    unpack,
)

CACHED_NUMBERS = 2**20  # log-probabilities computed at a time on a CPU: 4 MiB, which fit its cache
LEAST_COVERAGE = 1e-6  # attention below counts as this much: the logarithm of 0 would exclude a hypothesis
Fate = Literal["kept", "ended", "pruned"]


class Candidates(NamedTuple):
    """Hypotheses extended by a token, best first, (A, C) each. Impossible ones have a log-probability of -inf."""

    log_probs: NDArray[np.float32]  # of the whole hypothesis
    rows: Ids  # of the hypothesis that is extended
    tokens: Ids  # that extend it

    def at(self, *index: Any) -> "Candidates":  # noqa: ANN401
        """Index all fields."""
        return Candidates(self.log_probs[index], self.rows[index], self.tokens[index])


class Scorer(Follower):
    """Scores finished hypotheses by their log-probability over a length penalty, which never decreases with the length.

    none: 1; average: length^alpha; gnmt: ((5 + length) / 6)^alpha (Wu et al. 2016, eq. 14), with alpha >= 0. The length
    counts eos.
    """

    def __init__(self, kind: Literal["none", "average", "gnmt"] = "none", alpha: float = 0.0) -> None:
        self.kind, self.alpha = kind, alpha

    def penalty(self, length: int) -> float:
        """Compute the divisor of the log-probability of `length` tokens."""
        match self.kind:
            case "none":
                return 1.0
            case "average":
                return float(length**self.alpha)
            case "gnmt":
                return float(((5 + length) / 6) ** self.alpha)
        assert_never(self.kind)

    def attend(self, weights: Tensor | None) -> None:
        """Observe the attention (N, S) of the current step."""

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        """Score hypotheses of `length` tokens that end in these rows of these sentences."""
        divisor = self.penalty(length)
        return [log_prob / divisor for log_prob in log_probs]


class Selection(Follower):
    """Chooses which candidates of a step end and which continue: of the K best, those that end; the K best others."""

    def __init__(self, beam_size: int, eos: int) -> None:
        self.beam_size, self.eos = beam_size, eos
        self.candidates = 2 * beam_size  # that it chooses from, of each sentence

    def propose(self, totals: Tensor, part: slice) -> Tensor | None:
        """Propose candidates besides the best: log-probabilities (A', W * V') of the extensions of some sentences ->
        packed candidates (A', ...)."""
        return None

    def choose(self, candidates: Candidates) -> tuple[Flags, Candidates]:
        """Choose, of candidates (A, C), those that end (A, C), and the next live hypotheses (A, K)."""
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

    def keep(self, sentences: list[int]) -> None:
        """Drop the other active sentences."""


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
    """Return up to `n_best` <= K distinct hypotheses per sentence, best first.

    The search of a sentence stops when no live hypothesis can score above its n-th best finished one; with `stop`
    "beam" also when K hypotheses have finished, although a live one might still score higher. Fewer hypotheses are
    returned only if fewer have a probability above 0.
    """
    limits, device = batch.limits, batch.device
    active = list(range(len(limits.max_lengths)))
    next_log_probs, history = LogProbs(batch.symbols, device), History(batch)
    finished = _Finished(limits, scorer, n_best, selection.beam_size if stop == "beam" else math.inf)
    followers = [history, scorer, selection, *(make(len(active)) for make in batch.rules)]
    state, scores = batch.state, torch.zeros(len(active), 1, device=device)
    tokens = torch.full((len(active),), batch.symbols.bos, device=device)
    for now in range(max(limits.max_lengths, default=0)):
        output = batch.step(tokens, state)
        history.add(scores.flatten(), output.weights)
        scorer.attend(output.weights)
        mask = Mask.of(batch, now, active, scores.shape[1], followers)
        candidates = _best(output.logits, scores, next_log_probs, mask, selection, cached_numbers)
        ends, live = selection.choose(candidates)
        finished.add(now, active, candidates, ends)
        best_live = np.fmax.reduce(live.log_probs, axis=1).tolist()
        unfinished = [a for a, log_prob in enumerate(best_live) if finished.can_improve(active[a], log_prob)]
        if not unfinished:
            break
        remaining = None
        if len(unfinished) < len(active):
            remaining = torch.tensor(unfinished).to(device, non_blocking=True)
            active = [active[a] for a in unfinished]
            live = live.at(unfinished)
            selection.keep(unfinished)
        parents, chosen = live.rows.ravel(), live.tokens.ravel()
        followed = parents.tolist(), chosen.tolist()
        for follower in followers:
            follower.advance(*followed)
        state = output.state.branch(torch.from_numpy(parents).to(device, non_blocking=True), remaining)
        tokens = torch.from_numpy(chosen).to(device, non_blocking=True)
        scores = torch.from_numpy(live.log_probs).to(device, non_blocking=True)
    return history.hypotheses(finished.best())


def _best(
    logits: Tensor, scores: Tensor, next_log_probs: LogProbs, mask: Mask, selection: Selection, cached_numbers: int
) -> Candidates:
    """Find the best candidates of each sentence, and those that the selection proposes, from logits (N, V) and the
    log-probabilities so far (A, W)."""
    (sentences, width), vocabulary, packed, more = scores.shape, 0, [], None
    on_cpu = logits.device.type == "cpu"
    chunk = max(1, cached_numbers // (width * logits.shape[1])) if on_cpu else sentences
    for start in range(0, sentences, chunk):
        part, rows = slice(start, start + chunk), slice(start * width, (start + chunk) * width)
        log_probs = next_log_probs(logits[rows], mask.part(rows.start, rows.stop))
        vocabulary = log_probs.shape[1]
        totals = log_probs.view(-1, width, vocabulary).add_(scores[part, :, None]).flatten(1)
        top = pack_top(totals, min(selection.candidates, totals.shape[1]))
        more = selection.propose(totals, part)
        packed.append(top if more is None else torch.cat([top, more], 1))
    # The only synchronisation of a step: operations on the few candidates run on the CPU.
    best = (packed[0] if len(packed) == 1 else torch.cat(packed)).cpu().numpy()
    values, positions = unpack(best if more is None else distinct(best))
    rows_of_sentence, tokens = np.divmod(positions, vocabulary)
    return Candidates(values, rows_of_sentence + np.arange(0, sentences * width, width)[:, None], tokens)


class _Finished:
    """The finished hypotheses of every sentence."""

    def __init__(self, limits: Limits, scorer: Scorer, n_best: int, max_endings: float) -> None:
        """The search of a sentence stops at `max_endings` finished hypotheses."""
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

    def can_improve(self, sentence: int, log_prob: float) -> bool:
        """Can a sentence whose best live hypothesis has this log-probability still change its n-best list?"""
        endings = self._endings[sentence]
        if len(endings) >= self._max_endings:
            return False
        # Log-probabilities only fall, no divisor is larger, and coverage never adds to a score.
        bound = log_prob / self._largest_divisors[sentence]
        if len(endings) < self._n_best:
            return bound > -math.inf
        return bound > self._sorted(endings)[self._n_best - 1].score

    def best(self) -> list[list[Ending]]:
        """The n best of every sentence; of equal scores, the earlier one first."""
        return [self._sorted(endings)[: self._n_best] for endings in self._endings]

    @staticmethod
    def _sorted(endings: list[Ending]) -> list[Ending]:
        return sorted(endings, key=lambda ending: -ending.score)


def coverage_score(attention: NDArray[np.float32]) -> float:
    """sum_s log(min(max(a_s, 1e-6), 1)) of the attention a_s, (S,), that each source token, </s> among them, has
    received in all steps   (Wu et al. 2016, eq. 14)."""
    return float(np.log(np.clip(attention, LEAST_COVERAGE, 1.0)).sum(dtype=np.float64))


class Coverage(Scorer):
    """Adds a coverage score, which is never above 0, to those of finished hypotheses."""

    def __init__(self, plain: Scorer, strength: float, lengths: Sequence[int]) -> None:
        """plain: the scorer without coverage; strength: beta of Wu et al.; lengths: source tokens of each sentence."""
        super().__init__(plain.kind, plain.alpha)
        self._strength, self._lengths = strength, lengths
        self._sums: Tensor | None = None  # (N, S), of the live hypotheses up to this step

    def attend(self, weights: Tensor | None) -> None:
        assert weights is not None  # the model has an attention
        self._sums = weights.float() if self._sums is None else self._sums + weights

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        assert self._sums is not None
        self._sums = self._sums[torch.tensor(parents).to(self._sums.device, non_blocking=True)]

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        assert self._sums is not None
        sums = self._sums[torch.tensor(rows).to(self._sums.device)].cpu().numpy()
        # Padding is cut off, and each sum is computed alone: other sentences of the batch do not change a bit.
        covered = [coverage_score(row[: self._lengths[s]]) for row, s in zip(sums, sentences, strict=True)]
        normalised = super().scores(sentences, rows, log_probs, length)
        return [score + self._strength * coverage for score, coverage in zip(normalised, covered, strict=True)]


class Node(NamedTuple):
    """A candidate of one step: a hypothesis extended by one token."""

    parent: int | None  # index among the nodes of the previous step; None at the first step
    token: int
    log_prob: float  # of the whole hypothesis, natural logarithm
    score: float  # log_prob / length penalty, without coverage
    fate: Fate  # kept: in the beam after this step; ended: chose eos; pruned: neither


class Recorder(Selection):
    """Records the beam of one sentence as a tree: at each step the candidates kept, best first, then the others."""

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
    """List log-probability, row and token of the possible candidates of the only sentence, best first."""
    log_probs, rows, tokens = (field[0].tolist() for field in candidates)
    return [triple for triple in zip(log_probs, rows, tokens, strict=True) if triple[0] > -math.inf]


class BeamSearch(Search[schema.Beam]):
    """Keeps the K best hypotheses at each step."""

    takes_constraints = True

    def __init__(self, settings: schema.Beam) -> None:
        super().__init__(settings)
        self.beam_size = settings.beam_size
        self._scorer = Scorer(settings.length_penalty, settings.alpha)

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        make_selection = batch.selection or Selection
        return self._search_with(batch, make_selection(self.beam_size, batch.symbols.eos), n)

    def tree(self, batch: SearchBatch[Any], n: int) -> tuple[list[list[Hypothesis]], list[list[Node]]]:
        recorder = Recorder(self.beam_size, batch.symbols.eos, self._scorer, batch.shortlist)
        return self._search_with(batch, recorder, n), recorder.steps

    def _search_with(self, batch: SearchBatch[Any], selection: Selection, n: int) -> list[list[Hypothesis]]:
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
        return score + self.settings.coverage_penalty * coverage_score(attention.sum(0).numpy())
