"""Beam search as configured by search=beam: coverage scores, diverse groups, constraints, a record of the beam.

Shapes: A active sentences, N rows of a step, S source positions, C candidates, K beam size. With groups, the beam
search treats each group as a sentence with a beam of its own, called a unit: unit u is group u % G of sentence u // G.
Shapes: U active units, G groups, k hypotheses of a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import search as schema
from nmt.translate.beam import Candidates, Scorer, Selection, beam_search
from nmt.translate.phrases import Allocation
from nmt.translate.search import Flags, Hypothesis, Search, SearchBatch

NO_WORD = -1
Fate = Literal["kept", "ended", "pruned"]


class BeamSearch(Search[schema.Beam]):
    """Keeps the K best hypotheses at each step."""

    def __init__(self, settings: schema.Beam) -> None:
        super().__init__(settings)
        self.beam_size = settings.beam_size
        self._scorer = Scorer(settings.length_penalty, settings.alpha)
        self._coverage = CoverageScore(settings.coverage_penalty, settings.coverage_floor, settings.coverage_cap)

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        eos = batch.symbols.eos
        if self.settings.groups > 1:
            groups = Groups(self.beam_size, eos, self.settings.groups, self.settings.diversity)
            # If a group stopped earlier than at its k best, later groups would no longer avoid its words.
            return groups.merge(self._search(batch.repeated(groups.count), groups, groups.beam_size), n)
        if any(batch.constraints):
            assert batch.boundary is not None
            return self._search(batch, Allocation(self.beam_size, eos, batch.constraints, batch.boundary), n)
        return self._search(batch, Selection(self.beam_size, eos), n)

    def tree(self, batch: SearchBatch[Any], n: int) -> "tuple[list[list[Hypothesis]], list[list[Node]]]":
        if self.settings.groups > 1:
            raise UserError(
                f"search.groups={self.settings.groups}: a tree shows one beam, not several; use search.groups=1"
            )
        recorder = Recorder(self.beam_size, batch.symbols.eos, self._scorer, batch.shortlist)
        return self._search(batch, recorder, n), recorder.steps

    def _search(self, batch: SearchBatch[Any], selection: Selection, n: int) -> list[list[Hypothesis]]:
        scorer = self._scorer
        if self.settings.coverage_penalty:
            scorer = Coverage(scorer, self._coverage, batch.lengths)
        return beam_search(batch, selection, n, scorer=scorer, stop=self.settings.stop)

    def check_nbest(self, n: int) -> None:
        if n > self.beam_size:
            raise UserError(f"nbest={n}: more than the beam of {self.beam_size}; set search.beam_size={n}")

    def check_constraints(self) -> None:
        if self.settings.groups > 1:
            raise UserError(
                f"constraints and glossary need one beam, but search.groups={self.settings.groups} divides it; use "
                "search.groups=1"
            )

    def score(self, log_prob: float, length: int, attention: Tensor | None) -> float:
        score = log_prob / self._scorer.penalty(length)
        if not self.settings.coverage_penalty or attention is None:
            return score
        return score + self._coverage(attention.sum(0).numpy())

    def summary(self) -> str:
        settings = self.settings
        text = f"beam of {self.beam_size}, length penalty {settings.length_penalty}"
        if settings.coverage_penalty:
            text += f", coverage penalty {settings.coverage_penalty:g}"
            text += f" (floor {settings.coverage_floor:g}, cap {settings.coverage_cap:g})"
        return text + (f", {settings.groups} groups" if settings.groups > 1 else "")


@dataclass(frozen=True)
class CoverageScore:
    """strength * sum_s log(min(max(a_s, floor), cap)) of the attention a_s that each source token, </s> among them, has
    received in all steps, with strength >= 0 and 0 < floor < cap.

    A cap of 1 is the penalty of Wu et al. 2016, eq. 14, where strength is beta: it is never above 0, and a longer
    translation gains nothing once all tokens are covered. With a cap that no sum reaches, it is the coverage score of
    Li et al. 2018, where the floor is beta: it grows with the length, the less so the more often the same tokens are
    attended to.
    """

    strength: float
    floor: float = 1e-6
    cap: float = 1.0

    def __call__(self, attention: NDArray[np.float32]) -> float:
        """The score of a hypothesis whose source tokens received the attention sums (S,)."""
        return self.strength * float(np.log(np.clip(attention, self.floor, self.cap)).sum(dtype=np.float64))

    def upper_bound(self, length: int) -> float:
        """No hypothesis of a source of `length` tokens scores above this."""
        return self.strength * length * math.log(self.cap)


class Coverage(Scorer):
    """Adds a coverage score to those of finished hypotheses."""

    def __init__(self, plain: Scorer, score: CoverageScore, lengths: Sequence[int]) -> None:
        """plain: the scorer without coverage; lengths: the source tokens of each sentence."""
        super().__init__(plain.kind, plain.alpha)
        self._score, self._lengths = score, lengths
        self._sums: Tensor | None = None  # (N, S), the attention that live hypotheses have given so far

    def attend(self, weights: Tensor | None) -> None:
        assert weights is not None  # the model has an attention
        self._sums = weights.float() if self._sums is None else self._sums + weights

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        assert self._sums is not None
        self._sums = self._sums[torch.tensor(parents).to(self._sums.device, non_blocking=True)]

    def scores(self, sentences: Sequence[int], rows: Sequence[int], log_probs: list[float], length: int) -> list[float]:
        assert self._sums is not None
        sums = self._sums[torch.tensor(rows).to(self._sums.device)].cpu().numpy()
        # Padding is cut off, and each sum is made alone: other sentences of the batch do not change a bit.
        covered = [self._score(row[: self._lengths[s]]) for row, s in zip(sums, sentences, strict=True)]
        normalised = super().scores(sentences, rows, log_probs, length)
        return [score + coverage for score, coverage in zip(normalised, covered, strict=True)]

    def bound(self, sentence: int, score: float) -> float:
        return score + self._score.upper_bound(self._lengths[sentence])


class Groups(Selection):
    """Diverse beam search (Vijayakumar et al. 2018): the beam consists of groups, and each avoids the words of the
    groups before it. The groups stop by themselves."""

    def __init__(self, beam_size: int, eos: int, count: int, diversity: float) -> None:
        """beam_size: of all groups, a multiple of `count`; diversity: what a candidate loses, of its log-probability,
        for each hypothesis of an earlier group that takes the same word at the same step."""
        super().__init__(beam_size // count, eos)
        self.count, self._diversity = count, diversity
        # The penalty lowers at most (G - 1) k words in each of k hypotheses: these contain the 2 k best after it.
        self.candidates = 2 * self.beam_size + (count - 1) * self.beam_size**2

    def rank(self, candidates: Candidates, active: Sequence[int]) -> Candidates:
        """Choose the 2 k best of each active unit's candidates (U, C) by log-probability less penalty.

        The penalty decides the order alone: log-probabilities stay the model's. It spares the end.
        """
        size = self.beam_size
        sentences, groups = np.divmod(np.array(active), self.count)
        words = np.full((sentences.max() + 1, self.count * size), NO_WORD)  # taken at this step
        order = np.empty((len(active), min(2 * size, candidates.tokens.shape[1])), np.int64)
        for group in range(self.count):
            units = np.flatnonzero(groups == group)
            first_word = group * size
            log_probs, tokens = candidates.log_probs[units], candidates.tokens[units]
            times = (tokens[:, :, None] == words[sentences[units], None, :first_word]).sum(-1)
            best = (self._diversity * times - log_probs).argsort(1, kind="stable")[:, : order.shape[1]]
            order[units] = best
            tokens, log_probs = np.take_along_axis(tokens, best, 1), np.take_along_axis(log_probs, best, 1)
            continues = (tokens != self.eos) & np.isfinite(log_probs)
            live = (~continues).argsort(1, kind="stable")[:, :size]
            taken = np.take_along_axis(np.where(continues, tokens, NO_WORD), live, 1)
            words[sentences[units], first_word : first_word + taken.shape[1]] = taken
        return candidates.at(np.arange(len(active))[:, None], order)

    def merge(self, units: list[list[Hypothesis]], n_best: int) -> list[list[Hypothesis]]:
        """Choose the n best distinct hypotheses of each sentence from those of its units; of equal scores, the earlier
        group's first."""
        merged = []
        for start in range(0, len(units), self.count):
            hypotheses = [hypothesis for unit in units[start : start + self.count] for hypothesis in unit]
            distinct: dict[tuple[int, ...], Hypothesis] = {}
            for hypothesis in sorted(hypotheses, key=lambda hypothesis: -hypothesis.score):
                distinct.setdefault(tuple(hypothesis.tokens), hypothesis)
            merged.append(list(distinct.values())[:n_best])
        return merged


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
    """Log-probability, row and token of the possible candidates, best first, of the only sentence."""
    log_probs, rows, tokens = (field[0].tolist() for field in candidates)
    return [triple for triple in zip(log_probs, rows, tokens, strict=True) if triple[0] > -math.inf]
