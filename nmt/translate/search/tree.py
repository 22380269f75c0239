"""Beam search as a tree: which hypotheses were extended at each step, which ended, and which were pruned.

Shapes: A active sentences, C candidates.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Candidates(NamedTuple):
    """Extended hypotheses, best first, (A, C) each. Impossible ones have a log-probability of -inf."""

    log_probs: NDArray[np.float32]  # of the whole hypothesis
    rows: NDArray[np.int64]  # of the hypothesis that is extended
    tokens: NDArray[np.int64]  # that extend it


Fate = Literal["kept", "ended", "pruned"]


class Node(NamedTuple):
    """A candidate of one step: a hypothesis extended by one token."""

    parent: int | None  # index among the nodes of the previous step; None at the first step
    token: int
    log_prob: float  # of the whole hypothesis, natural logarithm
    score: float  # log_prob / length penalty, without coverage
    fate: Fate  # kept: in the beam after this step; ended: chose eos; pruned: neither


class BeamTree:
    """The candidates of each step of one sentence's search: those kept, best first, then the others."""

    def __init__(self) -> None:
        self.steps: list[list[Node]] = []

    def add(self, ranked: Candidates, live: Candidates, eos: int, beam_size: int, divisor: float) -> None:
        """Candidates (1, 2K) of a step and those kept (1, K). divisor: the length penalty."""
        assert len(ranked.rows) == 1
        kept = _triples(live)
        rest = [(triple, rank) for rank, triple in enumerate(_triples(ranked)) if triple not in kept]
        fates: list[tuple[tuple[float, int, int], Fate]] = [(triple, "kept") for triple in kept]
        for triple, rank in rest:
            fates.append((triple, "ended" if triple[2] == eos and rank < beam_size else "pruned"))
        first = not self.steps
        self.steps.append(
            [
                Node(None if first else row, token, log_prob, log_prob / divisor, fate)
                for (log_prob, row, token), fate in fates
            ]
        )


def _triples(candidates: Candidates) -> list[tuple[float, int, int]]:
    """Log-probability, row and token of the possible candidates of the only sentence."""
    fields = (field[0].tolist() for field in candidates)
    return [triple for triple in zip(*fields, strict=True) if triple[0] > -np.inf]
