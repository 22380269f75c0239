"""Beam search, batched over sentences and hypotheses.

Shapes: A sentences still searched, W live hypotheses in each (1 at first, then K), K beam, C candidates (2K),
V' padded vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nmt.search.hypothesis import Ending, History, Hypothesis, LengthPenalty, Limits, StateT, Step, Symbols
from nmt.search.log_probs import LogProbs, pack_top, unpack

CACHED_NUMBERS = 2**20  # log-probabilities made at a time on a CPU: 4 MiB, which stay in its cache


@torch.no_grad()
def beam_search(
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
) -> list[list[Hypothesis]]:
    """Up to `n_best` distinct hypotheses for each sentence, best first.

    The search of a sentence stops once no live hypothesis can reach a score above that of its n-th best ending; with
    `stop` "beam" already when K hypotheses have ended, which may miss a better one. The state comes with one row per
    sentence. Results are fewer only where fewer were found. Raises ValueError unless 1 <= n_best <= beam_size.
    """
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best is {n_best} and beam_size {beam_size}, but 1 <= n_best <= beam_size must hold")
    normalise = LogProbs(symbols, limits.min_length, device)
    history = History(symbols.eos)
    finished = _Finished(limits, penalty, beam_size, n_best, enough=beam_size if stop == "beam" else math.inf)
    active = list(range(len(limits.max_lengths)))
    scores = torch.zeros(len(active), 1, device=device)
    tokens = torch.full((len(active),), symbols.bos, device=device)
    for now in range(max(limits.max_lengths, default=0)):
        output = step(tokens, state)
        history.attend(output.weights)
        at_max = [now + 1 >= limits.max_lengths[sentence] for sentence in active]
        ranked = _rank(output.logits, scores, partial(normalise, length=now + 1), at_max, 2 * beam_size)
        finished.add(now, active, ranked, symbols.eos)
        live = _continuations(ranked, symbols.eos, beam_size)
        going = finished.still_open(active, live.log_probs[:, 0].tolist())
        if not going:
            break
        staying = None
        if len(going) < len(active):
            staying = torch.tensor(going).to(device, non_blocking=True)
            active = [active[a] for a in going]
            live = _Candidates(*(field[going] for field in live))
        parents, chosen = live.rows.flatten(), live.tokens.flatten()
        history.advance(parents.tolist(), chosen.tolist())
        state = output.state.branch(parents.to(device, non_blocking=True), staying)
        tokens = chosen.to(device, non_blocking=True)
        scores = live.log_probs.to(device, non_blocking=True)
    return history.hypotheses(finished.best())


class _Candidates(NamedTuple):
    """Extended hypotheses, best first, on the host: `(A, C)` each. Impossible ones have log_probs -inf."""

    log_probs: Tensor  # of the whole hypothesis
    rows: Tensor  # of the hypothesis that is extended
    tokens: Tensor  # by which it is extended


def _rank(
    logits: Tensor, scores: Tensor, normalise: Callable[..., Tensor], at_max: list[bool], size: int
) -> _Candidates:
    """(A * W, V), (A, W), flags of the A sentences -> the best candidates of each sentence."""
    (sentences, width), vocabulary, packed = scores.shape, 0, []
    few = max(1, CACHED_NUMBERS // (width * logits.shape[1])) if logits.device.type == "cpu" else sentences
    for start in range(0, sentences, few):
        some = slice(start, start + few)
        flags = [flag for flag in at_max[some] for _ in range(width)]
        log_probs = normalise(logits[start * width : (start + few) * width], at_max=flags)
        vocabulary = log_probs.shape[1]
        totals = log_probs.view(-1, width, vocabulary).add_(scores[some, :, None]).flatten(1)
        packed.append(pack_top(totals, min(size, totals.shape[1])))
    # The step's one synchronisation: all that is done with the candidates is small and happens on the host.
    values, positions = unpack(torch.cat(packed).cpu())
    first_rows = torch.arange(0, sentences * width, width)
    return _Candidates(values, first_rows[:, None] + positions // vocabulary, positions % vocabulary)


def _continuations(ranked: _Candidates, eos: int, beam_size: int) -> _Candidates:
    """The best candidates that do not end, (A, K)."""
    ends = ranked.tokens == eos
    order = ends.int().argsort(dim=1, stable=True)[:, :beam_size]
    log_probs = ranked.log_probs.masked_fill(ends, -math.inf).gather(1, order)
    # An impossible candidate may hold a padding column of the vocabulary, which no model could embed.
    tokens = ranked.tokens.gather(1, order).masked_fill(~log_probs.isfinite(), eos)
    return _Candidates(log_probs, ranked.rows.gather(1, order), tokens)


class _Finished:
    """The finished hypotheses of every sentence, and whether live ones can still change the result."""

    def __init__(self, limits: Limits, penalty: LengthPenalty, beam_size: int, n_best: int, enough: float) -> None:
        """enough: the number of endings at which the search of a sentence stops, whatever could follow."""
        self._penalty = penalty
        self._beam_size = beam_size
        self._n_best = n_best
        self._enough = enough
        self._largest_divisors = [penalty(length) for length in limits.max_lengths]
        self._endings: list[list[Ending]] = [[] for _ in limits.max_lengths]

    def add(self, now: int, active: list[int], ranked: _Candidates, eos: int) -> None:
        """Of the candidates of step `now`, those among the K best that end."""
        top = _Candidates(*(field[:, : self._beam_size] for field in ranked))
        ending = (top.tokens == eos) & top.log_probs.isfinite()
        divisor = self._penalty(now + 1)
        found = zip(
            ending.nonzero()[:, 0].tolist(),
            top.rows[ending].tolist(),
            top.log_probs[ending].tolist(),
            strict=True,
        )
        for a, row, log_prob in found:
            self._endings[active[a]].append(Ending(now, row, log_prob, log_prob / divisor))

    def still_open(self, active: list[int], best_live: list[float]) -> list[int]:
        """Which of the active sentences go on, given the log-probability of each one's best live one."""
        return [a for a, log_prob in enumerate(best_live) if self._can_change(active[a], log_prob)]

    def best(self) -> list[list[Ending]]:
        """The n-best of every sentence; of equal scores, the one found first."""
        return [self._sorted(endings)[: self._n_best] for endings in self._endings]

    def _can_change(self, sentence: int, log_prob: float) -> bool:
        endings = self._endings[sentence]
        if len(endings) >= self._enough:
            return False
        # Log-probabilities only fall, so no descendant scores above this, were it as long as allowed.
        reachable = log_prob / self._largest_divisors[sentence]
        if len(endings) < self._n_best:
            return reachable > -math.inf
        return reachable > self._sorted(endings)[self._n_best - 1].score

    @staticmethod
    def _sorted(endings: list[Ending]) -> list[Ending]:
        return sorted(endings, key=lambda ending: -ending.score)
