"""Coverage: the keys depend on what earlier steps attended to.

Shapes: B batch, S source positions, A attention.
"""

import torch
from torch import Tensor, nn

from nmt.attention.memory import Past
from nmt.attention.parts import Coverage


class LinearCoverage(Coverage):
    """Adds coverage to the keys: k'_s = k_s + w c_s + b, where c_s is the sum of the weights that earlier steps gave to
    s. An additive score sums k'_s and the query inside its tanh   (See et al. 2017, eq. 11)."""

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
