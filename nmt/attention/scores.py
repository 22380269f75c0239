"""Scores: how well a query fits each key. A score knows no mask.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention.
"""

import torch
from torch import Tensor, nn


class DotScore(nn.Module):
    """e_ts = q_t . k_s   (Luong et al. 2015, eq. 7, dot)."""

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, M)."""
        return memory

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked; Q = A."""
        return torch.bmm(query, keys.transpose(1, 2))


class GeneralScore(DotScore):
    """e_ts = q_t . W k_s   (Luong et al. 2015, eq. 7, general)."""

    def __init__(self, query_dim: int, memory_dim: int) -> None:
        super().__init__()
        self.key_proj = nn.Linear(memory_dim, query_dim, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, Q), once per source sentence."""
        projected: Tensor = self.key_proj(memory)
        return projected


class AdditiveScore(nn.Module):
    """e_ts = v . tanh(W q_t + U k_s)   (Bahdanau et al. 2015, A.1.2)."""

    def __init__(self, query_dim: int, memory_dim: int, attention_dim: int) -> None:
        super().__init__()
        self.query_proj = nn.Linear(query_dim, attention_dim, bias=False)
        self.key_proj = nn.Linear(memory_dim, attention_dim, bias=False)
        self.energy = nn.Linear(attention_dim, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence."""
        projected: Tensor = self.key_proj(memory)
        return projected

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked."""
        hidden = torch.tanh(self.query_proj(query)[:, :, None] + keys[:, None])  # (B, T, S, A)
        energies: Tensor = self.energy(hidden).squeeze(-1)
        return energies
