"""Windows: which source positions a query may attend to, and a falloff of the weights within them.

Shapes: B batch, S source positions, T target positions, W source positions in a window, Q size of a query, A size of a
hidden layer.
"""

import torch
from torch import Tensor, nn

from nmt.ops.products import Linear, wide


class Window(nn.Module):
    """Decides which valid positions a query may attend to: all, or in a `LocalWindow` those near a centre."""

    reach: int | None = None  # D, the greatest distance from the centre; None for all positions


class GlobalWindow(Window):
    """Keeps all valid positions (Bahdanau et al. 2015)."""


class LocalWindow(Window):
    """Keeps the positions in [p_t - D, p_t + D], where D = `reach` and p_t is the centre of target position t."""

    reach: int

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    @property
    def width(self) -> int:
        """Return W = 2 D + 2, the number of successive positions that are read for a centre. A window holds at most
        2 D + 1 positions, but rounding errors can shift the window by one position."""
        return 2 * self.reach + 2

    def narrows(self, length: int) -> bool:
        """Check if reading only the window's positions is faster than reading all `length` positions under a mask."""
        return 2 * self.width <= length

    def positions(self, centres: Tensor, length: int) -> Tensor:
        """Choose W successive positions for each centre: (B, T) -> int64 (B, T, W). The chosen positions include all
        of the sentence's `length` positions that are within reach of the centre."""
        first = (centres.detach().floor().long() - self.reach).clamp(0, length - self.width)
        return first[:, :, None] + torch.arange(self.width, device=centres.device)

    def centres(self, query: Tensor, valid: Tensor, steps: range) -> Tensor:
        """Compute the centre of each query's window: (B, T, Q), bool (B, S) -> (B, T).

        A centre is a source position, counted from 0, and may lie between two positions. steps: the T target positions,
        counted from 0, or the one target position that all queries share.
        """
        raise NotImplementedError

    def holds(self, offsets: Tensor) -> Tensor:
        """Check which offsets (B, T, W) from the centre are within reach."""
        return offsets.abs() <= self.reach

    def falloff(self, offsets: Tensor) -> Tensor | None:
        """Compute the factors that multiply the normalised weights: offsets from the centre (B, T, W) -> (B, T, W).
        Returns None if the window has no such factors."""
        return None


class LocalMonotonicWindow(LocalWindow):
    """Has the target position t as its centre p_t, or if t is beyond the end of the source, the last position
    (Luong et al. 2015, 3.2, local-m)."""

    def centres(self, query: Tensor, valid: Tensor, steps: range) -> Tensor:
        positions = torch.arange(steps.start, steps.stop, device=query.device)
        last = valid.sum(1, keepdim=True) - 1
        return positions.minimum(last.clamp(min=0)).float().expand(query.shape[:2])


class LocalPredictiveWindow(LocalWindow):
    """Predicts its centre from the query q_t: p_t = S sigmoid(v . tanh(W q_t) / sqrt(A))   (Luong et al. 2015, eq. 9
    and 10, local-p; the paper has no sqrt(A)).

    S is the length of the sentence, or the number of positions that a location score has if this is smaller; v (A) and
    W (A, Q) are learned. Positions count from 0. A Gaussian around p_t with sigma = D/2 multiplies the weights. Through
    this factor, the gradient reaches p_t.

    With Adam, an update moves each element of v by about the learning rate, and v . tanh(W q_t) by up to A times as
    much. Without the division by sqrt(A), a few updates move p_t to the start of the sentence, where the sigmoid
    is flat.
    """

    def __init__(self, reach: int, query_dim: int, dim: int) -> None:
        super().__init__(reach)
        self.centre_proj = Linear(query_dim, dim, bias=False)
        self.centre = Linear(dim, 1, bias=False)
        self.scale: float = dim**-0.5

    def centres(self, query: Tensor, valid: Tensor, steps: range) -> Tensor:
        centre = self.scale * self.centre(torch.tanh(self.centre_proj(query))).squeeze(-1)
        return valid.sum(1, keepdim=True) * torch.sigmoid(wide(centre))

    def falloff(self, offsets: Tensor) -> Tensor:
        """Compute exp(-offset^2 / (2 sigma^2)): (B, T, W) -> (B, T, W)."""
        return torch.exp(offsets.square() * (-2 / self.reach**2))
