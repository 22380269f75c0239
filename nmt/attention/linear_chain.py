"""Structured attention over a linear chain: neighbouring positions are attended to together, or not.

Shapes: B batch, T target positions, W source positions of the window (S where it is global).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer
from nmt.ops.linear_chain import linear_chain_log_odds
from nmt.ops.precision import wide


class LinearChainNormalizer(Normalizer):
    """Each position is attended to (z_s = 1) or not, and p(z) ~ exp(sum_s z_s e_s + sum_s A[z_s, z_s+1]) with learned
    A, a conditional random field over the positions in `keep` (Kim et al. 2017, 3.1 and 4.1).

    The weights are the marginals p(z_s = 1) divided by their sum, so that a context does not grow with the number of
    positions attended to. The paper multiplies these weights by a constant, which the next matrix can learn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairwise = nn.Parameter(torch.zeros(4))  # A by rows; 0: positions independent of each other

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        energies, keep = wide(energies), keep.expand_as(energies)
        log_odds = linear_chain_log_odds(energies.flatten(0, 1), keep.flatten(0, 1), self.pairwise)
        marginals = F.logsigmoid(log_odds).view_as(energies).masked_fill(~keep, torch.finfo(energies.dtype).min)
        log_weights = marginals.log_softmax(-1)
        return Normalized(log_weights.exp().masked_fill(~keep, 0.0), log_weights.masked_fill(~keep, -torch.inf))
