"""Marginals of a linear chain of binary variables in log space, in memory linear in its length, with a hand-written
gradient of the recursion.

Shapes: N chains, S positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SATURATED = 40.0  # softplus(x) = x from here on, to the last bit of float64


def linear_chain_log_odds(unary: Tensor, keep: Tensor, pairwise: Tensor) -> Tensor:
    """log p(z_s = 1) - log p(z_s = 0) under p(z) ~ exp(sum_s z_s u_s + sum_s A[z_s, z_s+1]), z_s in {0, 1}
    (Kim et al. 2017, 4.1): (N, S), bool (N, S), A = [[A_0, A_1], [A_2, A_3]] as (4,) -> (N, S).

    The chain has only the positions in `keep`, the neighbours of a position being the nearest ones in it. The values at
    other positions mean nothing and have no gradient.

    The forward-backward algorithm needs one number a position in either direction, the message's log-odds
    m_s+1 = g(u_s + m_s), g(x) = log (e^A_1 + e^(A_3 + x)) - log (e^A_0 + e^(A_2 + x)), as a factor that both values of
    z_s have in common changes no marginal. From right to left, A is transposed.
    """
    none, right, left, both = pairwise.to(unary.dtype).unbind()
    # g(x) = c + softplus(x + a) - softplus(x + b): rows c, a, b, of both directions
    steps = torch.stack([right - none, both - right, left - none, left - none, both - left, right - none]).view(2, 3)
    unary = unary.masked_fill(~keep, 0.0)
    both_ways = torch.stack([unary, unary.flip(-1)], dim=1)  # (N, 2, S)
    kept = torch.stack([keep, keep.flip(-1)], dim=1)
    forward, backward = _messages(both_ways, kept, steps).unbind(1)
    return unary + forward + backward.flip(-1)


def _messages(unary: Tensor, keep: Tensor, steps: Tensor) -> Tensor:
    """(N, 2, S), bool (N, 2, S), (2, 3) -> (N, 2, S): what comes to each position from those before it."""
    messages: Tensor = _Messages.apply(unary, keep, steps)  # type: ignore[no-untyped-call]
    return messages


class _Messages(torch.autograd.Function):
    """A loop over the positions. The gradient's loop has one operation for each: all derivatives of g are computed at
    once."""

    @staticmethod
    def forward(ctx: Any, unary: Tensor, keep: Tensor, steps: Tensor) -> Tensor:  # noqa: ANN401
        constant, shifts = steps[:, 0], steps[:, 1:].t()[:, None]  # (2,), (2, 1, 2)
        by_position, kept = unary.permute(2, 0, 1).contiguous(), keep.permute(2, 0, 1).contiguous()  # (S, N, 2)
        messages = torch.zeros_like(by_position)
        sums = torch.empty_like(by_position)  # x_s = u_s + m_s
        for s in range(len(sums)):
            torch.add(by_position[s], messages[s], out=sums[s])
            if s + 1 < len(sums):
                above, below = F.softplus(sums[s] + shifts, threshold=SATURATED).unbind()
                passed = (above - below).add_(constant)
                torch.where(kept[s], passed, messages[s], out=messages[s + 1])
        ctx.save_for_backward(sums, kept, steps)
        return messages.permute(1, 2, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        sums, kept, steps = ctx.saved_tensors
        above, below = torch.sigmoid(sums[:, None] + steps[:, 1:].t()[:, None]).unbind(1)  # (S, N, 2)
        slopes = torch.where(kept, above - below, 1.0)
        totals = grad.permute(2, 0, 1).contiguous()  # of m_s, through all that follows
        for s in range(len(totals) - 2, -1, -1):
            totals[s].addcmul_(totals[s + 1], slopes[s])
        following = F.pad(totals[1:], (0, 0, 0, 0, 0, 1)).masked_fill_(~kept, 0.0)  # of g(x_s)
        gradient = following * slopes
        of_steps = torch.stack([(following * factor).sum((0, 1)) for factor in (1.0, above, -below)], dim=1)
        return gradient.permute(1, 2, 0), None, of_steps
