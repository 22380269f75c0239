"""Constrained sparsemax, exact and with its gradient.

Shapes: N rows, S positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def constrained_sparsemax(energies: Tensor, bounds: Tensor) -> Tensor:
    """argmin |w - e|^2 over the distributions w with w_s <= u_s (Malaviya et al. 2018, 3): (N, S), (N, S) >= 0,
    possibly infinite -> (N, S).

    The bounds of a row sum to at least 1, or are all 0: such a row is 0. A position with bound 0 has no gradient, and
    its energy has no influence.
    """
    weights: Tensor = _ConstrainedSparsemax.apply(energies, bounds)  # type: ignore[no-untyped-call]
    return weights


class _ConstrainedSparsemax(torch.autograd.Function):
    """w_s = min(max(e_s - tau, 0), u_s): its sum falls with tau, linearly between the breakpoints e_s and e_s - u_s.
    The two between which it is 1 are found in sorted order."""

    @staticmethod
    def forward(ctx: Any, energies: Tensor, bounds: Tensor) -> Tensor:  # noqa: ANN401
        usable = bounds > 0
        energies = _relative(energies, usable)
        threshold = _threshold(energies, bounds)
        full = usable & (energies - bounds >= threshold)
        between = usable & (energies > threshold) & ~full
        # Once more from the positions between their bounds alone: rounding errors of the others' energies do not enter.
        energies = _relative(energies, between)
        rest = 1 - torch.where(full, bounds, 0.0).sum(-1, keepdim=True)
        threshold = (energies.sum(-1, keepdim=True) - rest) / between.sum(-1, keepdim=True).clamp(min=1)
        weights = torch.where(between, energies - threshold, 0.0).clamp(min=0.0).minimum(bounds)
        ctx.save_for_backward(between, full)
        return torch.where(full, bounds, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Malaviya et al. 2018, proposition 1: what a full position gives up goes to those between their bounds."""
        between, full = ctx.saved_tensors
        shared = torch.where(between, grad, 0.0).sum(-1, keepdim=True) / between.sum(-1, keepdim=True).clamp(min=1)
        centred = grad - shared
        return torch.where(between, centred, 0.0), torch.where(full, centred, 0.0)


def _relative(energies: Tensor, among: Tensor) -> Tensor:
    """Energies minus the greatest `among` them; 0 at all others."""
    lowest = torch.finfo(energies.dtype).min
    greatest = energies.masked_fill(~among, lowest).amax(-1, keepdim=True)
    return torch.where(among, energies - greatest, 0.0)


def _threshold(energies: Tensor, bounds: Tensor) -> Tensor:
    """tau (N, 1), up to rounding. Positions with bound 0 add two equal breakpoints, which cancel."""
    breakpoints, order = torch.cat([energies, energies - bounds], dim=-1).sort(-1, descending=True)
    slopes = torch.where(order < energies.shape[-1], 1.0, -1.0).to(energies.dtype)
    count, total = slopes.cumsum(-1), (slopes * breakpoints).cumsum(-1)
    # Between breakpoints j and j + 1, the weights sum to total_j - count_j tau.
    sums = total[:, :-1] - count[:, :-1] * breakpoints[:, 1:]
    segment = (sums >= 1).to(torch.uint8).argmax(-1, keepdim=True)
    return (total.gather(-1, segment) - 1) / count.gather(-1, segment).clamp(min=1)
