"""Beam search, batched over sentences and hypotheses.

Shapes: A active sentences, W live hypotheses in each (1 at first, then K), K beam size, C candidates (2K),
V' padded vocabulary.
"""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.model.state import StateT, Step
from nmt.translate.search.constrained import Allocation
from nmt.translate.search.coverage import Coverage
from nmt.translate.search.diverse import Groups
from nmt.translate.search.forbidden import Bans, Forbidden, Watch
from nmt.translate.search.hypothesis import Ending, History, Hypothesis, LengthPenalty, Limits, Symbols
from nmt.translate.search.log_probs import LogProbs, distinct, pack_top, unpack
from nmt.translate.search.tree import BeamTree, Candidates

CACHED_NUMBERS = 2**20  # log-probabilities computed at a time on a CPU: 4 MiB, which fit its cache


@torch.no_grad()
def beam_search(  # noqa: PLR0913
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    beam_size: int,
    n_best: int = 1,
    penalty: LengthPenalty,
    stop: Literal["beam", "exact"] = "beam",
    device: torch.device,
    tree: BeamTree | None = None,
    forbidden: Forbidden | None = None,
    allocation: Allocation | None = None,
    coverage: Coverage | None = None,
    groups: Groups | None = None,
) -> list[list[Hypothesis]]:
    """Up to `n_best` distinct hypotheses per sentence (row of the state), best first.

    The search of a sentence stops when no live hypothesis can score above its n-th best finished one; with `stop`
    "beam" also when K hypotheses have finished, although a live one might still score higher. Fewer hypotheses are
    returned only if fewer have a probability above 0. `tree` records the search of a single sentence.

    forbidden: phrases that no hypothesis may contain; those of one token are in symbols.banned. allocation: phrases
    that hypotheses must contain before they end; only if none does at the maximum length, others are returned.
    coverage: its score is added to those of finished hypotheses. groups: the beam consists of so many smaller
    ones, which each stop by themselves and may find the same, so that fewer are returned. Raises ValueError unless
    1 <= n_best <= beam_size, and for `groups` with `allocation` or `tree`.
    """
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best is {n_best} and beam_size {beam_size}, but 1 <= n_best <= beam_size must hold")
    size, kept = beam_size, n_best
    if groups is not None:
        if allocation is not None or tree is not None:
            raise ValueError("groups of a beam go with neither an allocation nor a tree")
        state, limits = state.select(groups.rows(len(limits.max_lengths), device)), limits.repeated(groups.count)
        coverage = None if coverage is None else coverage.repeated(groups.count)
        size = kept = groups.size  # if a group stopped earlier, later groups would no longer be penalised for its words
    found = _search(
        step,
        state,
        symbols,
        limits,
        beam_size=size,
        n_best=kept,
        penalty=penalty,
        stop=stop,
        device=device,
        tree=tree,
        forbidden=forbidden,
        allocation=allocation,
        coverage=coverage,
        groups=groups,
    )
    return found if groups is None else groups.merge(found, n_best)


def _search(  # noqa: PLR0913
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    beam_size: int,
    n_best: int,
    penalty: LengthPenalty,
    stop: Literal["beam", "exact"],
    device: torch.device,
    tree: BeamTree | None,
    forbidden: Forbidden | None,
    allocation: Allocation | None,
    coverage: Coverage | None,
    groups: Groups | None,
) -> list[list[Hypothesis]]:
    """See `beam_search`. With `groups`, a row of the state is one group of a sentence, with a beam of `beam_size`."""
    normalise = LogProbs(symbols, limits.min_length, device)
    history = History(symbols.eos)
    finished = _Finished(limits, penalty, coverage, n_best, max_endings=beam_size if stop == "beam" else math.inf)
    active = list(range(len(limits.max_lengths)))
    watch = None if forbidden is None else Watch(forbidden, len(active))
    following = [part for part in (history, watch, coverage) if part is not None]
    scores = torch.zeros(len(active), 1, device=device)
    tokens = torch.full((len(active),), symbols.bos, device=device)
    for now in range(max(limits.max_lengths, default=0)):
        output = step(tokens, state)
        history.add(scores.flatten(), output.weights)
        forced = [limits.forced(now, sentence, symbols.eos) for sentence in active]
        bans = _bans(watch, allocation, symbols.eos)
        size = 2 * beam_size if groups is None else groups.candidates
        ranked = _rank(output.logits, scores, normalise, now + 1, forced, size, bans, allocation)
        ranked = ranked if groups is None else groups.rank(ranked, active, symbols.eos)
        if allocation is None:
            ends, live = _ends(ranked, symbols.eos, beam_size), _continuations(ranked, symbols.eos, beam_size)
        else:
            ends, live = allocation.choose(ranked)
        finished.add(now, active, ranked, ends, output.weights)
        if tree is not None:
            tree.add(ranked, live, symbols.eos, beam_size, penalty(now + 1))
        best_live = (live.log_probs[:, 0] if groups is None else live.log_probs.max(1)).tolist()
        unfinished = [a for a, log_prob in enumerate(best_live) if finished.can_improve(active[a], log_prob)]
        if not unfinished:
            break
        remaining = None
        if len(unfinished) < len(active):
            remaining = torch.tensor(unfinished).to(device, non_blocking=True)
            active = [active[a] for a in unfinished]
            live = Candidates(live.log_probs[unfinished], live.rows[unfinished], live.tokens[unfinished])
            if allocation is not None:
                allocation.keep(unfinished)
        parents, chosen = live.rows.ravel(), live.tokens.ravel()
        for part in following:
            part.advance(parents.tolist(), chosen.tolist())
        state = output.state.branch(torch.from_numpy(parents).to(device, non_blocking=True), remaining)
        tokens = torch.from_numpy(chosen).to(device, non_blocking=True)
        scores = torch.from_numpy(live.log_probs).to(device, non_blocking=True)
    return history.hypotheses(finished.best())


def _bans(watch: Watch | None, allocation: Allocation | None, eos: int) -> Bans | None:
    """The tokens that each live hypothesis may not choose at the next step."""
    if watch is None and allocation is None:
        return None
    rows, tokens = ([], []) if watch is None else watch.bans()
    early = [] if allocation is None else allocation.unfinished().tolist()
    return rows + early, tokens + [eos] * len(early)


def _rank(
    logits: Tensor,
    scores: Tensor,
    normalise: LogProbs,
    length: int,
    forced: list[int | None],
    size: int,
    bans: Bans | None,
    allocation: Allocation | None,
) -> Candidates:
    """(A * W, V), (A, W) and forced tokens of the A sentences -> the `size` best candidates of each sentence, and those
    that the allocation proposes."""
    (sentences, width), vocabulary, packed = scores.shape, 0, []
    on_cpu = logits.device.type == "cpu"
    chunk = max(1, CACHED_NUMBERS // (width * logits.shape[1])) if on_cpu else sentences
    for start in range(0, sentences, chunk):
        part = slice(start, start + chunk)
        tokens_of_rows = [token for token in forced[part] for _ in range(width)]
        here = None if bans is None else _within(bans, start * width, (start + chunk) * width)
        log_probs = normalise(logits[start * width : (start + chunk) * width], length, tokens_of_rows, here)
        vocabulary = log_probs.shape[1]
        totals = log_probs.view(-1, width, vocabulary).add_(scores[part, :, None]).flatten(1)
        top = pack_top(totals, min(size, totals.shape[1]))
        packed.append(top if allocation is None else torch.cat([top, allocation.propose(totals, part)], 1))
    # The only synchronisation of a step: operations on the few candidates run on the CPU.
    best = (packed[0] if len(packed) == 1 else torch.cat(packed)).cpu().numpy()
    values, positions = unpack(best if allocation is None else distinct(best))
    rows, tokens = np.divmod(positions, vocabulary)
    return Candidates(values, rows + np.arange(0, sentences * width, width)[:, None], tokens)


def _within(bans: Bans, start: int, end: int) -> Bans:
    """The bans of the rows from `start` up to `end`, counted from `start`."""
    pairs = [(row - start, token) for row, token in zip(*bans, strict=True) if start <= row < end]
    return [row for row, _ in pairs], [token for _, token in pairs]


def _ends(ranked: Candidates, eos: int, beam_size: int) -> NDArray[np.bool_]:
    """The candidates that end, if they are among the K best, (A, C)."""
    ends: NDArray[np.bool_] = (ranked.tokens == eos) & np.isfinite(ranked.log_probs)
    ends[:, beam_size:] = False
    return ends


def _continuations(ranked: Candidates, eos: int, beam_size: int) -> Candidates:
    """The best candidates that do not end, (A, K)."""
    ends = ranked.tokens == eos
    order = ends.argsort(axis=1, kind="stable")[:, :beam_size]
    possible = np.where(ends, np.float32(-math.inf), ranked.log_probs)
    sentences = np.arange(len(order))[:, None]
    log_probs, tokens = possible[sentences, order], ranked.tokens[sentences, order]
    # The token of an impossible candidate may lie in the vocabulary's padding, which has no embedding.
    tokens[~np.isfinite(log_probs)] = eos
    return Candidates(log_probs, ranked.rows[sentences, order], tokens)


class _Finished:
    """The finished hypotheses of every sentence."""

    def __init__(
        self, limits: Limits, penalty: LengthPenalty, coverage: Coverage | None, n_best: int, max_endings: float
    ) -> None:
        """The search of a sentence stops at `max_endings` finished hypotheses."""
        self._coverage = coverage
        self._penalty, self._n_best, self._max_endings = penalty, n_best, max_endings
        self._largest_divisors = [penalty(length) for length in limits.max_lengths]
        self._endings: list[list[Ending]] = [[] for _ in limits.max_lengths]

    def add(
        self, now: int, active: list[int], ranked: Candidates, ends: NDArray[np.bool_], weights: Tensor | None
    ) -> None:
        """Add the candidates (A, C) of step `now`, which had this attention (N, S), that end."""
        if self._coverage is not None:
            self._coverage.add(weights)
        if not ends.any():
            return
        divisor = self._penalty(now + 1)
        sentences = [active[a] for a in ends.nonzero()[0].tolist()]
        rows, log_probs = ranked.rows[ends].tolist(), ranked.log_probs[ends].tolist()
        scores = [log_prob / divisor for log_prob in log_probs]
        if self._coverage is not None:
            coverages = self._coverage.scores(sentences, rows)
            scores = [score + coverage for score, coverage in zip(scores, coverages, strict=True)]
        for sentence, row, log_prob, score in zip(sentences, rows, log_probs, scores, strict=True):
            self._endings[sentence].append(Ending(now, row, log_prob, score))

    def can_improve(self, sentence: int, log_prob: float) -> bool:
        """Can a sentence whose best live hypothesis has this log-probability still change its n-best list?"""
        endings = self._endings[sentence]
        if len(endings) >= self._max_endings:
            return False
        # Log-probabilities only fall, and neither divisor nor coverage is larger: no continuation scores above this.
        bound = log_prob / self._largest_divisors[sentence]
        if self._coverage is not None:
            bound += self._coverage.upper_bound(sentence)
        if len(endings) < self._n_best:
            return bound > -math.inf
        return bound > self._sorted(endings)[self._n_best - 1].score

    def best(self) -> list[list[Ending]]:
        """The n best of every sentence; of equal scores, the earlier one first."""
        return [self._sorted(endings)[: self._n_best] for endings in self._endings]

    @staticmethod
    def _sorted(endings: list[Ending]) -> list[Ending]:
        return sorted(endings, key=lambda ending: -ending.score)
