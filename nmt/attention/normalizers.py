"""Normalizers: from energies to a distribution over source positions.

The end of this file has the functions for monotonic reading, chunks, linear chains and constrained sparsemax. Most have
an exact gradient written by hand, which needs memory linear in the length of the source.

Shapes: B batch, T target positions, W source positions in the window (all S if it is global), N rows of energies.
"""

from typing import Any, NamedTuple

import torch
from entmax import entmax15, sparsemax
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nmt.attention.scores import Past, Score
from nmt.ops.products import wide, wide_dtype

SATURATED = 40.0  # from this x on, softplus(x) equals x to the last bit of float64
FARTHEST = 1e3  # constrained sparsemax raises lower energies to this distance below the greatest one


class Normalized(NamedTuple):
    """A distribution over W source positions: those of a window, or all S positions. The normalizer's argument `keep`
    marks the positions that may have weight."""

    weights: Tensor  # (B, T, W), 0 outside `keep`
    # (B, T, W) logarithms of the weights, -inf outside `keep`; exact even where a weight underflows
    log_weights: Tensor | None = None


class Normalizer(nn.Module):
    """Turns the energies of a score into a distribution over source positions."""

    stops = False  # True for monotonic reading, which continues where the previous step stopped
    takes_masked = False  # True if `forward` also takes energies that are masked already, with None for `keep`

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """Compute weights (B, T, W) from energies (B, T, W).

        keep: bool (B, 1 or T, W), True where a position may have weight. The weights are float32 or wider. A row sums
        to 1, or to 0 if `keep` has no position. With monotonic reading, which may pass the end of the source, a row can
        sum to less than 1.
        """
        raise NotImplementedError


class SoftmaxNormalizer(Normalizer):
    """Computes w_s = exp(e_s / temperature) divided by its sum over the positions s in `keep`, for energies e."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.with_log_weights = False  # set to True for guided alignment and variational attention

    @property
    def takes_masked(self) -> bool:  # type: ignore[override]
        """Check if `forward` also takes energies that are masked already, with None for `keep`."""
        return not self.with_log_weights

    def forward(self, energies: Tensor, keep: Tensor | None, past: Past) -> Normalized:
        """Compute weights: (B, T, W), bool (B, 1 or T, W) -> (B, T, W). keep: None if the energies are masked."""
        dtype = wide_dtype(energies.dtype)
        if self.temperature != 1.0:
            energies = energies.to(dtype) / self.temperature  # in float16, the quotient may overflow
        if keep is None:
            return Normalized(energies.softmax(-1, dtype=dtype))
        drop = ~keep
        masked = energies.masked_fill(drop, torch.finfo(energies.dtype).min)
        if self.with_log_weights:
            log_weights = masked.log_softmax(-1, dtype=dtype)
            return Normalized(log_weights.exp().masked_fill(drop, 0.0), log_weights.masked_fill(drop, -torch.inf))
        return Normalized(masked.softmax(-1, dtype=dtype).masked_fill(drop, 0.0))


class SparsemaxNormalizer(Normalizer):
    """Computes sparsemax, the distribution nearest to the energies, which is 0 at positions with low energies
    (Martins and Astudillo 2016, eq. 2)."""

    function = staticmethod(sparsemax)

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        drop = ~keep
        weights: Tensor = self.function(_masked(energies, drop), dim=-1)
        return Normalized(weights.masked_fill(drop, 0.0))


class EntmaxNormalizer(SparsemaxNormalizer):
    """Computes 1.5-entmax, a function between softmax and sparsemax: w_s = max(e_s / 2 - tau, 0)^2, for energies e and
    the threshold tau with which the weights sum to 1   (Peters et al. 2019, 3)."""

    function = staticmethod(entmax15)


class FirstOrderNormalizer(Normalizer):
    """Makes the position s depend on the position s' of the previous step: w_s = sum_{s'} w'_{s'} p(s | s'), where w'
    are the weights of the previous step. The transition p(s | s') is exp(e_s + b(s - s')) divided by its sum over s,
    for energies e and a bias b, a function of s - s'   (Shankar and Sarawagi 2019, eq. 4 and 6). The weights of the
    first step are a softmax over the energies, without a bias.

    The bias is learned for distances |s - s'| up to `reach`, and is 0 for greater distances. If `monotonic` is True,
    the bias is -infinity for s < s' (Wu and Cotterell 2019, 3.1). The transitions of Wu and Cotterell use the score
    alone, or distances predicted from the decoder state and the encoder state.
    """

    def __init__(self, reach: int, monotonic: bool) -> None:
        super().__init__()
        self.reach, self.monotonic = reach, monotonic
        self.bias = nn.Parameter(torch.zeros(2 * reach + 1 if not monotonic else reach + 1))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """Compute the weights of one step: (B, 1, W), bool (B, 1, W) -> (B, 1, W)."""
        assert energies.shape[1] == 1
        drop = ~keep
        if past.step == 0:
            return Normalized(_masked(energies, drop).softmax(-1).masked_fill(drop, 0.0))
        weights = (past.weights[:, :, None] * self.transitions(energies, keep)).sum(1, keepdim=True)
        return Normalized(weights.masked_fill(drop, 0.0))

    def transitions(self, energies: Tensor, keep: Tensor) -> Tensor:
        """Compute p(s | s') for all W' = W previous positions: (B, 1, W), bool (B, 1, W) -> (B, W', W)."""
        positions = torch.arange(energies.shape[-1], device=energies.device)
        distances = positions - positions[:, None]  # (W', W), from the previous position s' to s
        nearest = distances.clamp(0 if self.monotonic else -self.reach, self.reach)
        bias = self.bias[nearest + (0 if self.monotonic else self.reach)]
        bias = bias.masked_fill(nearest != distances, 0.0)
        allowed = keep & (distances >= 0) if self.monotonic else keep
        return _masked(wide(energies) + bias, ~allowed).softmax(-1)


class LinearChainNormalizer(Normalizer):
    """Attends to any subset of the positions in `keep`, by a conditional random field   (Kim et al. 2017, 3.1 and 4.2).
    A subset z has the probability p(z) ~ exp(sum_s z_s e_s + sum_s A[z_s, z_{s+1}]), for energies e and a learned
    matrix A, where z_s is 1 if position s is in the subset, else 0.

    The weights are the marginals p(z_s = 1) divided by their sum, so that a context does not grow with the number of
    positions attended to. The paper then multiplies these weights by a constant, which this class leaves out: the
    matrix that multiplies the context can learn such a factor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairwise = nn.Parameter(torch.zeros(4))  # A, row by row; at 0, the positions are independent of each other

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        energies, keep = wide(energies), keep.expand_as(energies)
        log_odds = linear_chain_log_odds(energies.flatten(0, 1), keep.flatten(0, 1), self.pairwise)
        marginals = F.logsigmoid(log_odds).view_as(energies).masked_fill(~keep, torch.finfo(energies.dtype).min)
        log_weights = marginals.log_softmax(-1)
        return Normalized(log_weights.exp().masked_fill(~keep, 0.0), log_weights.masked_fill(~keep, -torch.inf))


class FertilityNormalizer(Normalizer):
    """Computes constrained sparsemax: of all distributions that give no word more than its budget, the one nearest to
    the energies. A word's budget is the fertility minus the weights that the word received at earlier steps   (Malaviya
    et al. 2018, 3).

    The last position, </s>, has no limit: it receives the weight that exceeds the budgets of the words. The paper
    appends a token for this purpose.
    """

    def __init__(self, fertility: float) -> None:
        """fertility: the limit on the sum of a word's weights over all steps."""
        super().__init__()
        self.fertility = fertility

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """Compute the weights of one step: (B, 1, W), bool (B, 1, W) -> (B, 1, W)."""
        assert energies.shape[1] == 1
        energies, keep = wide(energies)[:, 0], keep[:, 0]
        sink = keep & (keep.flip(-1).cumsum(-1).flip(-1) == 1)
        budgets = (self.fertility - past.total.to(energies.dtype)).clamp(min=0.0)
        bounds = budgets.masked_fill(sink, torch.inf).masked_fill(~keep, 0.0)
        return Normalized(constrained_sparsemax(energies, bounds)[:, None])


class MonotonicNormalizer(Normalizer):
    """Reads the source positions in order, from where the previous step stopped. If reading reaches position s, it
    stops there with probability p_s = sigmoid(e_s + r), for energies e and a learned offset r   (Raffel et al. 2017).

    In training, the weights are expectations: w_s = p_s sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l), where w' are the
    weights of the previous step (ibid., eq. 9). Noise, which training adds to the energies, drives p_s to 0 or 1.
    With probability 1 - sum_s w_s, reading passes the end without stopping. Outside training, reading stops at the
    first position with p_s > 1/2. If no position has p_s > 1/2, the context is zero at this step and at all further
    steps, as in the paper. With `outside_training` "expected", the weights are expectations outside training as well.
    """

    stops = True

    def __init__(self, noise: float, initial_offset: float, outside_training: str = "stop") -> None:
        """noise: standard deviation of the noise on the energies. initial_offset: initial value of r, negative so that
        reading does not stop at the first position. outside_training: "stop" or "expected"."""
        super().__init__()
        self.noise, self.always_expected = noise, outside_training == "expected"
        self.offset = nn.Parameter(torch.tensor(initial_offset))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """Compute the weights of one step: (B, 1, W), bool (B, 1, W) -> (B, 1, W). Outside training, a row is one-hot,
        or zero if reading has passed the end, unless the weights are always expectations."""
        assert energies.shape[1] == 1
        energies, keep = wide(energies)[:, 0] + self.offset, keep[:, 0]
        before = past.log_stops
        if before is None:  # the first step starts to read at position 0
            before = torch.full_like(energies, -torch.inf)
            before[:, 0] = 0.0
        before = before.to(energies.dtype)
        if self.training and self.noise:
            energies = energies + self.noise * torch.randn_like(energies)
        if self.training or self.always_expected:
            log_weights = monotonic_log_weights(energies, keep, before)[:, None]
        else:
            log_weights = _first_from(before, (energies > 0) & keep).to(energies.dtype).log()[:, None]
        return Normalized(log_weights.exp(), log_weights)


class Chunk(nn.Module):
    """Computes the weights of monotonic chunkwise attention   (Chiu and Raffel 2018). A chunk of n positions ends where
    monotonic reading stops. A softmax over the energies u of a second score divides the weight of the stop among the
    chunk's positions.

    The weights are w_s = sum_{k=s}^{s+n-1} a_k exp(u_s) / sum_{l=k-n+1}^{k} exp(u_l), where a_k is the weight that
    `MonotonicNormalizer` gives to position k (ibid., eq. 13 and 17). The w_s have the same sum as the a_k.
    """

    def __init__(self, score: Score, size: int) -> None:
        """score: the second score; coverage does not change its keys. size: n, the number of positions in a chunk."""
        super().__init__()
        self.score, self.size = score, size

    def forward(self, log_stops: Tensor, energies: Tensor, keep: Tensor) -> Normalized:
        """Compute the weights: log a (B, 1, S), u (B, 1, S), bool (B, 1, S) -> (B, 1, S)."""
        log_weights = chunk_log_weights(log_stops, wide(energies), keep, self.size)
        return Normalized(log_weights.exp(), log_weights)


def _masked(energies: Tensor, drop: Tensor) -> Tensor:
    """Mask energies with the lowest finite number of their dtype, float32 or wider. With -inf, a row without positions
    would become NaN."""
    energies = wide(energies)
    return energies.masked_fill(drop, torch.finfo(energies.dtype).min)


def _first_from(before: Tensor, selected: Tensor) -> Tensor:
    """Find the position where reading stops next: before (B, W), selected bool (B, W) -> bool (B, W). Reading stopped
    last where `before` is greatest. The result is True at the first selected position from there on. If a row of
    `before` is -inf everywhere, reading has passed the end, and the result is False everywhere."""
    positions = torch.arange(selected.shape[1], device=selected.device)
    stopped_at = before.argmax(-1, keepdim=True)
    eligible = selected & (positions >= stopped_at) & (before > -torch.inf).any(-1, keepdim=True)
    return eligible & (eligible.cumsum(-1) == 1)


def monotonic_log_weights(energies: Tensor, keep: Tensor, previous: Tensor) -> Tensor:
    """Compute log w_s, the logarithms of the expected weights of `MonotonicNormalizer`: energies e (B, S), bool
    (B, S), log w' (B, S) of the previous step -> (B, S).

    w_s = p_s q_s, where p = sigmoid(e) and q_s is the probability that reading reaches s. Reading always passes the
    positions outside `keep`; their log-weight is -inf. In log space no weight underflows, so even very improbable
    positions have a gradient.
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
        # dL/dlog w'_k = sum_{s>=k} grad_s share_sk, where share_sk <= 1 is the fraction of q_s that comes from a start
        # at k. This sum is also computed in log space, once for positive and once for negative terms.
        signed = torch.stack([grad, -grad]).clamp_(min=0.0).log_().add_(offsets)
        positive, negative = signed.flip(-1).logcumsumexp(-1).flip(-1).add_(started).exp_()
        of_previous = positive - negative
        # The gradient of log (1 - p_l) is that of all paths of reading which pass l. It is computed as the gradient of
        # all paths that end after l, minus the gradient of those that also start after l.
        passing = (grad - of_previous).flip(-1).cumsum(-1).flip(-1)
        passing = F.pad(passing[:, 1:], (0, 1)).masked_fill_(drop, 0.0)
        return grad - (grad + passing).mul_(torch.sigmoid(energies)), None, of_previous


def chunk_log_weights(log_stops: Tensor, energies: Tensor, keep: Tensor, chunk: int) -> Tensor:
    """Compute log w_s, the logarithms of the weights of `Chunk`: log_stops, which is log a, (..., S), energies, which
    are u, (..., S), keep, bool (..., S) -> (..., S). chunk: n.

    Outside `keep`, log a must be -inf, and the result is -inf too. The two sums of the formula are computed as moving
    sums in log space.
    """
    chunk = min(chunk, energies.shape[-1])
    lowest = torch.finfo(energies.dtype).min  # instead of -inf, whose gradients would be NaN
    chunks = F.pad(energies.masked_fill(~keep, lowest), (chunk - 1, 0), value=lowest).unfold(-1, chunk, 1)
    shares = (log_stops - chunks.logsumexp(-1)).clamp(min=lowest)
    sums = F.pad(shares, (0, chunk - 1), value=lowest).unfold(-1, chunk, 1).logsumexp(-1)
    return (energies + sums).masked_fill((sums < lowest / 2) | ~keep, -torch.inf)  # below lowest / 2: no stop is near


def linear_chain_log_odds(unary: Tensor, keep: Tensor, pairwise: Tensor) -> Tensor:
    """Compute the log-odds of the marginals of N linear chains: u (N, S), bool (N, S), A (4,) -> (N, S).

    The log-odds are log p(z_s = 1) - log p(z_s = 0) under p(z) ~ exp(sum_s z_s u_s + sum_s A[z_s, z_{s+1}]), where z_s
    is 0 or 1, u are energies and A = [[A_0, A_1], [A_2, A_3]]   (Kim et al. 2017, 3.1). The chain consists of the
    positions in `keep`; the results at other positions are undefined and have no gradient.

    In the forward-backward algorithm, a factor common to z_s = 0 and z_s = 1 changes no marginal. So one number per
    position and direction is enough: the log-odds m_s of the message to s. From left to right, m_{s+1} = g(u_s + m_s)
    with g(x) = log(e^A_1 + e^(A_3 + x)) - log(e^A_0 + e^(A_2 + x)); from right to left, A is transposed.
    """
    none, right, left, both = pairwise.to(unary.dtype).unbind()
    # g(x) = c + softplus(x + a) - softplus(x + b); one row (c, a, b) for each direction
    steps = torch.stack([right - none, both - right, left - none, left - none, both - left, right - none]).view(2, 3)
    unary = unary.masked_fill(~keep, 0.0)
    both_ways = torch.stack([unary, unary.flip(-1)], dim=1)  # (N, 2, S)
    kept = torch.stack([keep, keep.flip(-1)], dim=1)
    messages: Tensor = _Messages.apply(both_ways, kept, steps)  # type: ignore[no-untyped-call]
    forward, backward = messages.unbind(1)
    return unary + forward + backward.flip(-1)


class _Messages(torch.autograd.Function):
    """Computes the message m_s to each position in both directions, in a loop over the positions: u (N, 2, S), bool
    (N, 2, S), (c, a, b) of g for each direction (2, 3) -> (N, 2, S). The loop of the gradient needs only one operation
    per position, because all derivatives of g are computed before it."""

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
        totals = grad.permute(2, 0, 1).contiguous()  # gradients of m_s, to which the loop adds those of later messages
        for s in range(len(totals) - 2, -1, -1):
            totals[s].addcmul_(totals[s + 1], slopes[s])
        following = F.pad(totals[1:], (0, 0, 0, 0, 0, 1)).masked_fill_(~kept, 0.0)  # gradient of g(x_s)
        gradient = following * slopes
        of_steps = torch.stack([(following * factor).sum((0, 1)) for factor in (1.0, above, -below)], dim=1)
        return gradient.permute(1, 2, 0), None, of_steps


def constrained_sparsemax(energies: Tensor, bounds: Tensor) -> Tensor:
    """Compute constrained sparsemax, the distribution w that minimises |w - e|^2 under w_s <= u_s   (Malaviya et al.
    2018, 3), for N rows: energies e (N, S), bounds u (N, S) >= 0, possibly infinite -> (N, S).

    The bounds of a row must sum to at least 1, or all be 0. Energies that are more than `FARTHEST` below the greatest
    one are raised to this distance, because in float32 energy minus bound would lose the bound. If all bounds are 0, w
    is 0. A position with bound 0 has no gradient, and its energy has no influence.
    """
    weights: Tensor = _ConstrainedSparsemax.apply(energies, bounds)  # type: ignore[no-untyped-call]
    return weights


class _ConstrainedSparsemax(torch.autograd.Function):
    """Computes w_s = min(max(e_s - tau, 0), u_s) with the threshold tau at which the w_s sum to 1. The sum decreases as
    tau grows, linearly between the breakpoints e_s and e_s - u_s, so tau is found among the sorted breakpoints. The
    bounds of a row sum to at least 1, or are all 0; then w is 0."""

    @staticmethod
    def forward(ctx: Any, energies: Tensor, bounds: Tensor) -> Tensor:  # noqa: ANN401
        usable = bounds > 0
        # A shift of all energies leaves w unchanged. With the greatest at 0, float32 can tell e_s - u_s from e_s.
        energies = _shifted_or_zero(energies, usable).clamp(min=-FARTHEST)
        threshold = _threshold(energies, bounds)
        full = usable & (energies - bounds >= threshold)  # w_s = u_s
        between = usable & (energies > threshold) & ~full  # 0 < w_s < u_s
        # Compute tau again from the positions in between alone, so that it is free of the rounding errors of all other
        # energies, which are 0 now. The weights e_s - tau sum to what the full positions leave.
        energies = _shifted_or_zero(energies, between)
        left = 1 - torch.where(full, bounds, 0.0).sum(-1, keepdim=True)
        threshold = (energies.sum(-1, keepdim=True) - left) / between.sum(-1, keepdim=True).clamp(min=1)
        weights = torch.where(between, energies - threshold, 0.0).clamp(min=0.0).minimum(bounds)
        ctx.save_for_backward(between, full)
        return torch.where(full, bounds, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """See Malaviya et al. 2018, proposition 1: what a full position (w_s = u_s) gives up is divided among the
        positions with 0 < w_s < u_s."""
        between, full = ctx.saved_tensors
        shared = torch.where(between, grad, 0.0).sum(-1, keepdim=True) / between.sum(-1, keepdim=True).clamp(min=1)
        centred = grad - shared
        return torch.where(between, centred, 0.0), torch.where(full, centred, 0.0)


def _shifted_or_zero(energies: Tensor, among: Tensor) -> Tensor:
    """Subtract, from the energies at positions in `among`, the greatest of them. Other positions become 0."""
    lowest = torch.finfo(energies.dtype).min
    greatest = energies.masked_fill(~among, lowest).amax(-1, keepdim=True)
    return torch.where(among, energies - greatest, 0.0)


def _threshold(energies: Tensor, bounds: Tensor) -> Tensor:
    """Find tau (N, 1), up to rounding. A position with bound 0 adds two equal breakpoints, which cancel each other."""
    breakpoints, order = torch.cat([energies, energies - bounds], dim=-1).sort(-1, descending=True)
    slopes = torch.where(order < energies.shape[-1], 1.0, -1.0).to(energies.dtype)
    count, total = slopes.cumsum(-1), (slopes * breakpoints).cumsum(-1)
    # Between breakpoints j and j + 1, the weights sum to total_j - count_j tau.
    sums = total[:, :-1] - count[:, :-1] * breakpoints[:, 1:]
    segment = (sums >= 1).to(torch.uint8).argmax(-1, keepdim=True)
    return (total.gather(-1, segment) - 1) / count.gather(-1, segment).clamp(min=1)
