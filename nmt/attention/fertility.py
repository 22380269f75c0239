"""Attention with fertilities: a source word receives only so much weight in the whole translation.

Shapes: B batch, W source positions (S, as no window goes with it).
"""

import torch
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer
from nmt.ops.constrained_sparsemax import constrained_sparsemax
from nmt.ops.precision import wide


class FertilityNormalizer(Normalizer):
    """The distribution nearest to the energies that gives no position more than its budget, the fertility minus its
    weights at earlier steps: constrained sparsemax   (Malaviya et al. 2018, 3).

    The last position, </s>, is without a limit: it receives what the words cannot. The paper appends a token for this.
    """

    reads_past = True

    def __init__(self, fertility: float) -> None:
        """fertility: of every word, the sum of its weights over all steps."""
        super().__init__()
        self.fertility = fertility

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W)."""
        assert energies.shape[1] == 1
        energies, keep = wide(energies)[:, 0], keep[:, 0]
        sink = keep & (keep.flip(-1).cumsum(-1).flip(-1) == 1)
        budgets = (self.fertility - past.total.to(energies.dtype)).clamp(min=0.0)
        bounds = budgets.masked_fill(sink, torch.inf).masked_fill(~keep, 0.0)
        return Normalized(constrained_sparsemax(energies, bounds)[:, None])
