"""Diverse beam search (Vijayakumar et al. 2018): the beam consists of groups, and each avoids the words of the groups
before it.

The search treats each group as a separate sentence with a separate beam, called a unit: unit u is group
u % G of sentence u // G.

Shapes: U active units, C candidates, G groups, k hypotheses of a group.
"""

import numpy as np
import torch
from torch import Tensor

from nmt.translate.search.hypothesis import Hypothesis
from nmt.translate.search.tree import Candidates

NO_WORD = -1


class Groups:
    """How the groups of a beam depend on each other."""

    def __init__(self, count: int, diversity: float, beam_size: int) -> None:
        """diversity: what a candidate loses, of its log-probability, for each hypothesis of an earlier group that takes
        the same word at the same step. Raises ValueError unless the groups divide the beam and diversity >= 0."""
        if count < 1 or beam_size % count:
            raise ValueError(f"{count} groups do not divide a beam of {beam_size}")
        if not diversity >= 0:
            raise ValueError(f"the diversity is {diversity}, but must be at least 0")
        self.count, self.size, self._diversity = count, beam_size // count, diversity

    def rows(self, sentences: int, device: torch.device) -> Tensor:
        """The sentence of each unit, int64 (sentences * G,)."""
        return torch.arange(sentences, device=device).repeat_interleave(self.count)

    @property
    def candidates(self) -> int:
        """So many candidates of a group contain its 2 k best after the penalty, which lowers at most (G - 1) k words in
        each of k hypotheses."""
        return 2 * self.size + (self.count - 1) * self.size**2

    def rank(self, ranked: Candidates, units: list[int], eos: int) -> Candidates:
        """The best candidates (U, C) of active units, ascending -> the 2 k best of each, (U, 2k), by log-probability
        less penalty.

        The penalty decides the order alone: log-probabilities stay the model's. It spares the end.
        """
        sentences, groups = np.divmod(np.array(units), self.count)
        words = np.full((sentences.max() + 1, self.count * self.size), NO_WORD)  # taken at this step
        order = np.empty((len(units), min(2 * self.size, ranked.tokens.shape[1])), np.int64)
        for group in range(self.count):
            of_group = np.flatnonzero(groups == group)
            own, start = sentences[of_group], group * self.size
            log_probs, tokens = ranked.log_probs[of_group], ranked.tokens[of_group]
            times = (tokens[:, :, None] == words[own, None, :start]).sum(-1)
            best = (self._diversity * times - log_probs).argsort(1, kind="stable")[:, : order.shape[1]]
            order[of_group] = best
            tokens, log_probs = np.take_along_axis(tokens, best, 1), np.take_along_axis(log_probs, best, 1)
            going = (tokens != eos) & np.isfinite(log_probs)
            first = (~going).argsort(1, kind="stable")[:, : self.size]
            taken = np.where(going, tokens, NO_WORD)
            words[own, start : start + first.shape[1]] = np.take_along_axis(taken, first, 1)
        rows = np.arange(len(units))[:, None]
        return Candidates(ranked.log_probs[rows, order], ranked.rows[rows, order], ranked.tokens[rows, order])

    def merge(self, units: list[list[Hypothesis]], n_best: int) -> list[list[Hypothesis]]:
        """The hypotheses of all units -> the n best distinct ones of each sentence; of equal scores, the earlier
        group's first."""
        merged = []
        for start in range(0, len(units), self.count):
            found = [hypothesis for unit in units[start : start + self.count] for hypothesis in unit]
            distinct: dict[tuple[int, ...], Hypothesis] = {}
            for hypothesis in sorted(found, key=lambda hypothesis: -hypothesis.score):
                distinct.setdefault(tuple(hypothesis.tokens), hypothesis)
            merged.append(list(distinct.values())[:n_best])
        return merged
