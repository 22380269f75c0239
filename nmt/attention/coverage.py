"""Coverage: the keys depend on what earlier steps attended to.

Shapes: B batch, S source positions, A attention.
"""

import torch
from torch import Tensor, nn

from nmt.attention.memory import Past
from nmt.attention.parts import Coverage


class LinearCoverage(Coverage):
    """k'_s = k_s + w c_s + b, c_s the sum of earlier weights on s   (See et al. 2017, eq. 11: inside an additive
    score's tanh)."""

    def __init__(self, keys_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(keys_dim, 1))
        self.bias = nn.Parameter(torch.zeros(keys_dim))

    def keys(self, keys: Tensor) -> Tensor:
        """(B, S, A) -> (B, S, A), once per source sentence: adds b."""
        return keys + self.bias.to(keys.dtype)

    def key_projection(self) -> Tensor:
        """w (A, 1)."""
        return self.weight

    def key_features(self, past: Past) -> Tensor:
        """c (B, S, 1)."""
        return past.total[:, :, None]
