"""Windows: which of the valid source positions a query may attend to.

Shapes: B batch, S source positions, T target positions, Q query, W window, A attention.
"""

import torch
from torch import Tensor

from nmt.attention.parts import Window
from nmt.ops.linear import Linear
from nmt.ops.precision import wide


class GlobalWindow(Window):
    """All valid positions (Bahdanau et al. 2015)."""


class LocalMonotonicWindow(Window):
    """[p_t - D, p_t + D] with p_t = t   (Luong et al. 2015, 3.2, local-m).

    Beyond the end of the source, the window stays at the last position.
    """

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def centre(self, query: Tensor, valid: Tensor, steps: range) -> Tensor:
        """(B, T, Q), bool (B, S) -> (B, T)."""
        positions = torch.arange(steps.start, steps.stop, device=query.device)
        last = valid.sum(1, keepdim=True) - 1
        return positions.minimum(last.clamp(min=0)).float().expand(query.shape[:2])


class LocalPredictiveWindow(Window):
    """[p_t - D, p_t + D] with p_t = S sigmoid(v . tanh(W q_t)), the weights falling off as a Gaussian around p_t with
    sigma = D/2   (Luong et al. 2015, eq. 9 and 10, local-p).

    S is the length of the sentence; positions count from 0. The gradient reaches p_t through the Gaussian.
    """

    def __init__(self, reach: int, query_dim: int, attention_dim: int) -> None:
        super().__init__()
        self.reach = reach
        self.position_proj = Linear(query_dim, attention_dim, bias=False)
        self.position = Linear(attention_dim, 1, bias=False)

    def centre(self, query: Tensor, valid: Tensor, steps: range) -> Tensor:
        """(B, T, Q), bool (B, S) -> (B, T)."""
        position = self.position(torch.tanh(self.position_proj(query))).squeeze(-1)
        return valid.sum(1, keepdim=True) * torch.sigmoid(wide(position))

    def falloff(self, offsets: Tensor) -> Tensor:
        """(B, T, W) -> exp(-offset^2 / (2 sigma^2))."""
        assert self.reach is not None
        return torch.exp(offsets.square() * (-2 / self.reach**2))
