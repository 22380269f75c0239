"""Normalizers: from energies to weights.

Shapes: B batch, S source positions, T target positions.
"""

import torch
from torch import Tensor, nn

from nmt.attention.memory import Past


class SoftmaxNormalizer(nn.Module):
    """w = exp(e / temperature) / sum, over the positions that are kept."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Tensor:
        """(B, T, S), bool (B, 1 or T, S) -> float32 or wider (B, T, S).

        A row without any kept position has zeros for weights; the lowest finite number instead of -inf keeps
        NaN out of its gradients.
        """
        if energies.dtype in {torch.float16, torch.bfloat16}:
            energies = energies.float()
        scaled = energies if self.temperature == 1.0 else energies / self.temperature
        masked = scaled.masked_fill(~keep, torch.finfo(scaled.dtype).min)
        return torch.softmax(masked, dim=-1).masked_fill(~keep, 0.0)
