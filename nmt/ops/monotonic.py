"""Expected weights of monotonic and of monotonic chunkwise attention in log space, in memory linear in the source.

Shapes: B batch, S source positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def monotonic_log_weights(energies: Tensor, keep: Tensor, previous: Tensor) -> Tensor:
    """log w_s with w_s = p_s q_s, q_s = sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l), p = sigmoid(e)
    (Raffel et al. 2017, eq. 9): (B, S), bool (B, S), log w' (B, S) of the previous step -> (B, S).

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
    """log w_s with w_s = sum_{k=s}^{s+n-1} a_k exp(u_s) / sum_{l=k-n+1}^{k} exp(u_l), n = chunk (Chiu and Raffel 2018,
    eq. 14): log a (..., S), u (..., S), bool (..., S) -> (..., S), -inf outside `keep`, where log a must be -inf.

    Two moving sums, in log space.
    """
    lowest = torch.finfo(energies.dtype).min  # in place of -inf, of which gradients would be NaN
    chunks = F.pad(energies.masked_fill(~keep, lowest), (chunk - 1, 0), value=lowest).unfold(-1, chunk, 1)
    shares = (log_stops - chunks.logsumexp(-1)).clamp(min=lowest)
    sums = F.pad(shares, (0, chunk - 1), value=lowest).unfold(-1, chunk, 1).logsumexp(-1)
    return (energies + sums).masked_fill((sums < lowest / 2) | ~keep, -torch.inf)
