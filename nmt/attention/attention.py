"""Attention put together from its parts.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention.
"""

from typing import cast

import torch
from torch import Tensor, nn

from nmt.attention.memory import Memory, Normalizer, Past, Score, Window


class Attention(nn.Module):
    """context_t = sum_s w_ts h_s, with w = normalizer(score(query, keys), window)   (Bahdanau et al. 2015, eq. 5)."""

    def __init__(self, score: nn.Module, window: nn.Module, normalizer: nn.Module) -> None:
        super().__init__()
        self.score, self.window, self.normalizer = score, window, normalizer

    def remember(self, states: Tensor, valid: Tensor) -> Memory:
        """(B, S, M), bool (B, S) -> Memory: the keys are projected here, once per sentence."""
        return Memory(states, cast(Score, self.score).keys(states), valid)

    def forward(self, query: Tensor, memory: Memory, past: Past) -> tuple[Tensor, Tensor]:
        """(B, T, Q), Memory, Past -> context (B, T, M), weights (B, T, S)."""
        energies = cast(Score, self.score)(query, memory.keys)
        keep = cast(Window, self.window)(query, memory.valid, past)
        weights = cast(Normalizer, self.normalizer)(energies, keep, past)
        return torch.bmm(weights.to(memory.values.dtype), memory.values), weights
