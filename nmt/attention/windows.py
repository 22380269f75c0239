"""Windows: which of the valid source positions a query may attend to.

Shapes: B batch, S source positions, T target positions, Q query.
"""

from torch import Tensor, nn

from nmt.attention.memory import Past


class GlobalWindow(nn.Module):
    """All valid positions (Bahdanau et al. 2015)."""

    def forward(self, query: Tensor, valid: Tensor, past: Past) -> Tensor:
        """(B, T, Q), (B, S) -> bool (B, 1, S), True = keep."""
        return valid[:, None]
