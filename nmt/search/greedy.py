"""Greedy search: the most probable token at every step."""

import torch
from torch import Tensor

from nmt.search.hypothesis import Hypothesis, LengthPenalty, Limits, StateT, Step, Symbols
from nmt.search.rollout import rollout


def greedy_search(
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    penalty: LengthPenalty,
    device: torch.device,
) -> list[list[Hypothesis]]:
    """A list with one hypothesis for each sentence, from a state with one row per sentence."""
    rows = rollout(step, state, symbols, limits, choose=_most_probable, penalty=penalty, device=device)
    return [[hypothesis] for hypothesis in rows]


def _most_probable(log_probs: Tensor) -> Tensor:
    return log_probs.argmax(-1)
