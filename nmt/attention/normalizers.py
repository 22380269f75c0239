"""Normalizers: from energies to weights.

Shapes: B batch, T target positions, W source positions of the window (S where it is global).
"""

import torch
from entmax import entmax15, sparsemax
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer


class SoftmaxNormalizer(Normalizer):
    """w = exp(e / temperature) / sum, over the positions that are kept."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        scaled = energies if self.temperature == 1.0 else energies / self.temperature
        return Normalized(torch.softmax(_masked(scaled, keep), dim=-1).masked_fill(~keep, 0.0))


class SparsemaxNormalizer(Normalizer):
    """The distribution nearest to the energies: zeros where they are low   (Martins and Astudillo 2016, eq. 2)."""

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        weights: Tensor = sparsemax(_masked(energies, keep), dim=-1)
        return Normalized(weights.masked_fill(~keep, 0.0))


class EntmaxNormalizer(Normalizer):
    """1.5-entmax, between softmax and sparsemax: w = max(e / 2 - tau, 0)^2   (Peters et al. 2019, 3)."""

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        weights: Tensor = entmax15(_masked(energies, keep), dim=-1)
        return Normalized(weights.masked_fill(~keep, 0.0))


class HardNormalizer(Normalizer):
    """One position: drawn from the softmax in training, the most probable one otherwise   (Xu et al. 2015, 4.1).

    Nothing is differentiated through the draw; nmt.attention.policy trains it by REINFORCE. With probability
    `expected` a step takes the softmax itself instead of a draw, which lessens the variance (ibid.).
    """

    def __init__(self, expected: float) -> None:
        super().__init__()
        self.expected = expected

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W), in training with log_prob and entropy (B, T)."""
        log_probs = _masked(energies, keep).log_softmax(-1)
        if not self.training:
            return Normalized(_one_hot(log_probs, keep))
        drawn = _one_hot(log_probs + _gumbel_noise(log_probs), keep)
        kept = log_probs.masked_fill(~keep, 0.0)
        probs = log_probs.exp().masked_fill(~keep, 0.0)
        log_prob, entropy = (drawn * kept).sum(-1), -(probs * kept).sum(-1)
        if self.expected:
            soft = torch.rand_like(log_prob) < self.expected
            drawn = torch.where(soft[..., None], probs, drawn)
            log_prob = log_prob.masked_fill(soft, 0.0)
        return Normalized(drawn, log_prob, entropy)


class GumbelNormalizer(Normalizer):
    """One position: drawn by the Gumbel-max trick in training, with the gradient of softmax((log p + noise) /
    temperature) passed straight through; the most probable one otherwise   (Jang et al. 2017, 2.2)."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        masked = _masked(energies, keep)
        if not self.training:
            return Normalized(_one_hot(masked, keep))
        noisy = masked + _gumbel_noise(masked)
        soft = torch.softmax(noisy / self.temperature, dim=-1).masked_fill(~keep, 0.0)
        return Normalized(_one_hot(noisy, keep) + (soft - soft.detach()))


class MonotonicNormalizer(Normalizer):
    """Reading on from where the step before stopped, each position is taken with probability p_s = sigmoid(e_s + r).

    In training the expected weights w_s = p_s sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l) over those of the step before,
    w' (Raffel et al. 2017, eq. 9), with noise on the energies that drives p to 0 or 1; otherwise the first position
    with p > 1/2. A row sums to less than 1 by the probability that the end is passed without any position taken:
    there the context is zero, as it is in the paper, and from then on.
    """

    reads_past = True

    def __init__(self, noise: float, initial_offset: float) -> None:
        """noise: its standard deviation; initial_offset: r at first, below 0 so that early reading does not stop."""
        super().__init__()
        self.noise = noise
        self.offset = nn.Parameter(torch.tensor(initial_offset))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W)."""
        assert energies.shape[1] == 1
        energies = _wide(energies)[:, 0] + self.offset
        keep = keep[:, 0]
        before = past.weights.to(energies.dtype)
        if past.step == 0:
            before = torch.zeros_like(energies)
            before[:, 0] = 1.0
        if not self.training:
            return Normalized(_next_position(energies, keep, before)[:, None])
        if self.noise:
            energies = energies + self.noise * torch.randn_like(energies)
        taken = torch.sigmoid(energies).masked_fill(~keep, 0.0)
        # log prod_{l<s} (1 - p_l); differences of these never leave (-inf, 0], unlike quotients of the products.
        passed = F.logsigmoid(-energies).masked_fill(~keep, 0.0).cumsum(-1)
        passed = F.pad(passed, (1, -1))
        reach = (passed[:, :, None] - passed[:, None, :]).tril().exp().tril()  # (B, s, k), from k to s
        return Normalized((taken * (reach * before[:, None]).sum(-1))[:, None])  # no bmm: autocast would round it


def _next_position(energies: Tensor, keep: Tensor, before: Tensor) -> Tensor:
    """(B, W) -> one-hot (B, W): the first position, from the one before on, with energy above 0; zeros if none."""
    positions = torch.arange(energies.shape[1], device=energies.device)
    stopped_at = before.argmax(-1, keepdim=True)
    eligible = (energies > 0) & keep & (positions >= stopped_at) & (before.sum(-1, keepdim=True) > 0)
    return _one_hot(eligible.to(energies.dtype), eligible)


def _wide(energies: Tensor) -> Tensor:
    return energies.to(torch.promote_types(energies.dtype, torch.float32))


def _masked(energies: Tensor, keep: Tensor) -> Tensor:
    """In float32 or wider; the lowest finite number instead of -inf keeps NaN out of rows without any position."""
    energies = _wide(energies)
    return energies.masked_fill(~keep, torch.finfo(energies.dtype).min)


def _one_hot(energies: Tensor, keep: Tensor) -> Tensor:
    """1 at each row's greatest energy, if that is kept."""
    best = energies.argmax(-1, keepdim=True)
    return torch.zeros_like(energies).scatter_(-1, best, 1.0).masked_fill(~keep, 0.0)


def _gumbel_noise(like: Tensor) -> Tensor:
    """-log of an exponential variate, which is drawn above 0."""
    return -torch.empty_like(like).exponential_().clamp_(min=torch.finfo(like.dtype).tiny).log_()
