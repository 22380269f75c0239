"""Distributions over source positions, exact, in memory linear in the source and with gradients by hand.

Shapes: B batch, N rows, S source positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

SATURATED = 40.0  # softplus(x) = x from here on, to the last bit of float64


def monotonic_log_weights(energies: Tensor, keep: Tensor, previous: Tensor) -> Tensor:
    """Expected weights of monotonic reading: log w_s with w_s = p_s q_s, q_s = sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l),
    p = sigmoid(e)   (Raffel et al. 2017, eq. 9): energies (B, S), bool (B, S), log w' (B, S) of the previous step ->
    (B, S).

    Positions outside `keep` are always passed; their log-weight is -inf. In log space no weight underflows, so even
    very improbable positions have a gradient, which is written by hand.
    """
    log_weights: Tensor = _MonotonicLogWeights.apply(energies, keep, previous)  # type: ignore[no-untyped-call]
    return log_weights


class _MonotonicLogWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, energies: Tensor, keep: Tensor, previous: Tensor) -> Tensor:  # noqa: ANN401
        drop = ~keep
        passed = F.logsigmoid(-energies).masked_fill_(drop, 0.0).cumsum(-1)
        passed = F.pad(passed[:, :-1], (1, 0))  # log prod_{l<s} (1 - p_l)
        started = previous - passed
        log_reached = torch.logcumsumexp(started, dim=-1).add_(passed)  # log q
        unreached = log_reached == -torch.inf
        ctx.save_for_backward(energies, drop, started, (passed - log_reached).masked_fill_(unreached, 0.0), unreached)
        return F.logsigmoid(energies).add_(log_reached).masked_fill_(drop, -torch.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        energies, drop, started, offsets, unreached = ctx.saved_tensors
        grad = grad.masked_fill(drop | unreached, 0.0)
        # dL/dlog w'_k = sum_{s>=k} grad_s share_sk, where share_sk <= 1 is the part of q_s that comes from k. This sum,
        # too, is computed in log space, with positive and negative terms apart.
        signed = torch.stack([grad, -grad]).clamp_(min=0.0).log_().add_(offsets)
        positive, negative = signed.flip(-1).logcumsumexp(-1).flip(-1).add_(started).exp_()
        of_previous = positive - negative
        # The gradient of log (1 - p_l) is that of all paths which pass l: they end after l, but do not start after it.
        passing = (grad - of_previous).flip(-1).cumsum(-1).flip(-1)
        passing = F.pad(passing[:, 1:], (0, 1)).masked_fill_(drop, 0.0)
        return grad - (grad + passing).mul_(torch.sigmoid(energies)), None, of_previous


def chunk_log_weights(log_stops: Tensor, energies: Tensor, keep: Tensor, chunk: int) -> Tensor:
    """Expected weights within chunks: log w_s with w_s = sum_{k=s}^{s+n-1} a_k exp(u_s) / sum_{l=k-n+1}^{k} exp(u_l),
    n = chunk   (Chiu and Raffel 2018, eq. 13 and 17): log a (..., S), u (..., S), bool (..., S) -> (..., S), -inf
    outside `keep`, where log a must be -inf.

    Two moving sums, in log space.
    """
    lowest = torch.finfo(energies.dtype).min  # in place of -inf, of which gradients would be NaN
    chunks = F.pad(energies.masked_fill(~keep, lowest), (chunk - 1, 0), value=lowest).unfold(-1, chunk, 1)
    shares = (log_stops - chunks.logsumexp(-1)).clamp(min=lowest)
    sums = F.pad(shares, (0, chunk - 1), value=lowest).unfold(-1, chunk, 1).logsumexp(-1)
    return (energies + sums).masked_fill((sums < lowest / 2) | ~keep, -torch.inf)


def linear_chain_log_odds(unary: Tensor, keep: Tensor, pairwise: Tensor) -> Tensor:
    """Marginals of a linear chain: log p(z_s = 1) - log p(z_s = 0) under
    p(z) ~ exp(sum_s z_s u_s + sum_s A[z_s, z_s+1]), z_s in {0, 1}   (Kim et al. 2017, 3.1): u (N, S), bool (N, S),
    A = [[A_0, A_1], [A_2, A_3]] as (4,) -> (N, S).

    The chain consists of the positions in `keep`; values at other positions are undefined and have no gradient.

    The forward-backward algorithm needs one number per position in either direction, the log-odds of the message,
    m_s+1 = g(u_s + m_s), g(x) = log (e^A_1 + e^(A_3 + x)) - log (e^A_0 + e^(A_2 + x)): a factor that both values of z_s
    share changes no marginal. From right to left, A is transposed.
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
    """Compute the message to each position from those before it: (N, 2, S), bool (N, 2, S), (2, 3) -> (N, 2, S)."""
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


def constrained_sparsemax(energies: Tensor, bounds: Tensor) -> Tensor:
    """Constrained sparsemax: argmin |w - e|^2 over the distributions w with w_s <= u_s   (Malaviya et al. 2018, 3):
    energies (N, S), bounds (N, S) >= 0, possibly infinite -> (N, S).

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
    """Subtract the greatest of the energies in `among`; 0 elsewhere."""
    lowest = torch.finfo(energies.dtype).min
    greatest = energies.masked_fill(~among, lowest).amax(-1, keepdim=True)
    return torch.where(among, energies - greatest, 0.0)


def _threshold(energies: Tensor, bounds: Tensor) -> Tensor:
    """Find tau (N, 1), up to rounding. Positions with bound 0 add two equal breakpoints, which cancel."""
    breakpoints, order = torch.cat([energies, energies - bounds], dim=-1).sort(-1, descending=True)
    slopes = torch.where(order < energies.shape[-1], 1.0, -1.0).to(energies.dtype)
    count, total = slopes.cumsum(-1), (slopes * breakpoints).cumsum(-1)
    # Between breakpoints j and j + 1, the weights sum to total_j - count_j tau.
    sums = total[:, :-1] - count[:, :-1] * breakpoints[:, 1:]
    segment = (sums >= 1).to(torch.uint8).argmax(-1, keepdim=True)
    return (total.gather(-1, segment) - 1) / count.gather(-1, segment).clamp(min=1)
