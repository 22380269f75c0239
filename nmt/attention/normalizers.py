"""Normalizers: from energies to a distribution over source positions.

Shapes: B batch, T target positions, W source positions of the window (S where it is global).
"""

from typing import NamedTuple

import torch
from entmax import entmax15, sparsemax
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.attention.memory import Past
from nmt.attention.scores import Score
from nmt.ops.distributions import chunk_log_weights, constrained_sparsemax, linear_chain_log_odds, monotonic_log_weights
from nmt.ops.precision import wide, wide_dtype


class Normalized(NamedTuple):
    """A distribution over positions."""

    weights: Tensor  # (B, T, W), zero where not kept
    log_weights: Tensor | None = None  # (B, T, W), -inf where not kept; exact even where the weight underflows


class Normalizer(nn.Module):
    """Turns energies into weights."""

    reads_past = False
    stops = False  # whether it reads on from where the previous step stopped
    takes_masked = False  # whether it also takes energies that are masked already, with None for `keep`

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights, float32 or wider, zero where not kept. A row sums to 1, to 0 if
        `keep` has no position, and to less than 1 if monotonic reading may pass the end."""
        raise NotImplementedError


class SoftmaxNormalizer(Normalizer):
    """w = exp(e / temperature) / sum, over the positions in `keep`."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.with_log_weights = False  # guided alignment and variational attention set it

    @property
    def takes_masked(self) -> bool:  # type: ignore[override]
        """Whether it also takes energies that are masked already, with None for `keep`."""
        return not self.with_log_weights

    def forward(self, energies: Tensor, keep: Tensor | None, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) or None -> weights (B, T, W)."""
        dtype = wide_dtype(energies.dtype)
        if self.temperature != 1.0:
            energies = energies.to(dtype) / self.temperature  # in float16, the quotient may be too large
        if keep is None:
            return Normalized(energies.softmax(-1, dtype=dtype))
        drop = ~keep
        masked = energies.masked_fill(drop, torch.finfo(energies.dtype).min)
        if self.with_log_weights:
            log_weights = masked.log_softmax(-1, dtype=dtype)
            return Normalized(log_weights.exp().masked_fill(drop, 0.0), log_weights.masked_fill(drop, -torch.inf))
        return Normalized(masked.softmax(-1, dtype=dtype).masked_fill(drop, 0.0))


class SparsemaxNormalizer(Normalizer):
    """The distribution nearest to the energies: zeros where they are low   (Martins and Astudillo 2016, eq. 2)."""

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        drop = ~keep
        weights: Tensor = sparsemax(_masked(energies, drop), dim=-1)
        return Normalized(weights.masked_fill(drop, 0.0))


class EntmaxNormalizer(Normalizer):
    """1.5-entmax, between softmax and sparsemax: w = max(e / 2 - tau, 0)^2   (Peters et al. 2019, 3)."""

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        drop = ~keep
        weights: Tensor = entmax15(_masked(energies, drop), dim=-1)
        return Normalized(weights.masked_fill(drop, 0.0))


class FirstOrderNormalizer(Normalizer):
    """The position depends on the previous one: w_s = sum_{s'} w'_{s'} p(s | s'), w' the weights of the previous step,
    with p(s | s') = exp(e_s + b(s - s')) / sum (Shankar and Sarawagi 2019, eq. 4 and 6). The first step has no bias.

    The bias b is learned for distances up to `reach` and 0 beyond. If monotonic, it is -infinity for negative distances
    (Wu and Cotterell 2019, 3.1; their transitions also read the states).
    """

    reads_past = True

    def __init__(self, reach: int, monotonic: bool) -> None:
        super().__init__()
        self.reach, self.monotonic = reach, monotonic
        self.bias = nn.Parameter(torch.zeros(2 * reach + 1 if not monotonic else reach + 1))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W)."""
        assert energies.shape[1] == 1
        drop = ~keep
        if past.step == 0:
            return Normalized(_masked(energies, drop).softmax(-1).masked_fill(drop, 0.0))
        weights = (past.weights[:, :, None] * self.transitions(energies, keep)).sum(1, keepdim=True)
        return Normalized(weights.masked_fill(drop, 0.0))

    def transitions(self, energies: Tensor, keep: Tensor) -> Tensor:
        """Compute p(s | s'): (B, 1, W), bool (B, 1, W) -> (B, W', W)."""
        allowed = keep
        W = energies.shape[-1]
        positions = torch.arange(W, device=energies.device)
        distances = positions - positions[:, None]  # (W', W), from the previous position s' to s
        nearest = distances.clamp(0 if self.monotonic else -self.reach, self.reach)
        bias = self.bias[nearest + (0 if self.monotonic else self.reach)]
        bias = bias.masked_fill(nearest != distances, 0.0)
        if self.monotonic:
            allowed = keep & (distances >= 0)
        return _masked(wide(energies) + bias, ~allowed).softmax(-1)


class LinearChainNormalizer(Normalizer):
    """Each position is attended to (z_s = 1) or not, and p(z) ~ exp(sum_s z_s e_s + sum_s A[z_s, z_s+1]) with learned
    A, a conditional random field over the positions in `keep` (Kim et al. 2017, 3.1 and 4.2).

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


class FertilityNormalizer(Normalizer):
    """Constrained sparsemax: the distribution nearest to the energies that gives no word more than its budget, which is
    the fertility minus the word's weights at earlier steps   (Malaviya et al. 2018, 3).

    The last position, </s>, has no limit: it receives the weight that the words cannot. The paper appends a token for
    this.
    """

    reads_past = True

    def __init__(self, fertility: float) -> None:
        """fertility: the limit on the sum of a word's weights over all steps."""
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


class MonotonicNormalizer(Normalizer):
    """Reading continues from where the previous step stopped and never goes back: it stops at position s with
    probability p_s = sigmoid(e_s + r).

    In training: the expected weights w_s = p_s sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l), given those of the previous
    step w' (Raffel et al. 2017, eq. 9), with noise on the energies that drives p to 0 or 1. Otherwise: the first
    position with p > 1/2. With probability 1 - sum_s w_s reading passes the end without stopping; then the context is
    zero for this and all further steps, as in the paper.
    """

    reads_past = True
    stops = True

    def __init__(self, noise: float, initial_offset: float) -> None:
        """noise: its standard deviation. initial_offset: the initial r, negative so that reading does not stop at the
        first position."""
        super().__init__()
        self.noise = noise
        self.offset = nn.Parameter(torch.tensor(initial_offset))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W); outside training one of them is 1, or none."""
        assert energies.shape[1] == 1
        energies, keep = wide(energies)[:, 0] + self.offset, keep[:, 0]
        before = past.log_stops
        if before is None:  # at position 0
            before = torch.full_like(energies, -torch.inf)
            before[:, 0] = 0.0
        before = before.to(energies.dtype)
        if self.training:
            if self.noise:
                energies = energies + self.noise * torch.randn_like(energies)
            log_weights = monotonic_log_weights(energies, keep, before)[:, None]
        else:
            log_weights = _first_from(before, (energies > 0) & keep).to(energies.dtype).log()[:, None]
        return Normalized(log_weights.exp(), log_weights)


class Chunk(nn.Module):
    """Monotonic chunkwise attention: where monotonic reading stops, a chunk of n positions ends, and a softmax over the
    energies u of a second score divides the weight among them   (Chiu and Raffel 2018).

    In training: the expected weights w_s = sum_{k=s}^{s+n-1} a_k exp(u_s) / sum_{l=k-n+1}^{k} exp(u_l), with a_k the
    expected weights of monotonic attention (ibid., eq. 13 and 17). Their sum is that of the a_k.
    """

    def __init__(self, score: Score, size: int) -> None:
        """size: n. Coverage does not change the keys of this score."""
        super().__init__()
        self.score, self.size = score, size

    def forward(self, log_stops: Tensor, energies: Tensor, keep: Tensor) -> Normalized:
        """log a (B, 1, S), u (B, 1, S), bool (B, 1, S) -> weights (B, 1, S)."""
        log_weights = chunk_log_weights(log_stops, wide(energies), keep, self.size)
        return Normalized(log_weights.exp(), log_weights)


def _masked(energies: Tensor, drop: Tensor) -> Tensor:
    """Mask energies, in float32 or wider. The lowest finite number, not -inf: a row without a position gives no NaN."""
    energies = wide(energies)
    return energies.masked_fill(drop, torch.finfo(energies.dtype).min)


def _first_from(before: Tensor, selected: Tensor) -> Tensor:
    """Find the first selected position at or after the one where `before` is greatest; none where `before` is -inf
    everywhere: (B, W), bool (B, W) -> bool (B, W)."""
    positions = torch.arange(selected.shape[1], device=selected.device)
    stopped_at = before.argmax(-1, keepdim=True)
    eligible = selected & (positions >= stopped_at) & (before > -torch.inf).any(-1, keepdim=True)
    return eligible & (eligible.cumsum(-1) == 1)
