"""Normalizers: from energies to weights.

Shapes: B batch, T target positions, W source positions of the window (S where it is global).
"""

import torch
from entmax import entmax15, sparsemax
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer, wide
from nmt.ops.sentence_draws import draw


class SoftmaxNormalizer(Normalizer):
    """w = exp(e / temperature) / sum, over the positions in `keep`."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.with_log_weights = False  # needed by guided alignment only

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        drop, wide = ~keep, torch.promote_types(energies.dtype, torch.float32)
        energies = energies if self.temperature == 1.0 else energies / self.temperature
        masked = energies.masked_fill(drop, torch.finfo(energies.dtype).min)
        if self.with_log_weights:
            log_weights = masked.log_softmax(-1, dtype=wide)
            return Normalized(log_weights.exp().masked_fill(drop, 0.0), log_weights.masked_fill(drop, -torch.inf))
        return Normalized(masked.softmax(-1, dtype=wide).masked_fill(drop, 0.0))


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


class HardNormalizer(Normalizer):
    """One position: sampled from the softmax in training, the most probable one otherwise   (Xu et al. 2015, 4.1).

    Sampling is not differentiable; nmt.attention.policy trains it by REINFORCE. With probability `expected`, a step
    uses the softmax weights instead of a sample, which reduces the variance (ibid.).
    """

    def __init__(self, expected: float) -> None:
        super().__init__()
        self.expected = expected

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W), in training with log_prob and entropy (B, T)."""
        drop = ~keep
        log_probs = _masked(energies, drop).log_softmax(-1)
        if not self.training:
            return Normalized(_one_hot(log_probs, drop))
        B, T, _ = log_probs.shape
        position_draws, soft_draws = draw(B, 2 * T, log_probs.device).view(B, T, 2).unbind(-1)
        finite = log_probs.masked_fill(drop, 0.0)
        probs = log_probs.exp().masked_fill(drop, 0.0)
        sample = _sampled(probs, drop, position_draws)
        log_prob, entropy = (sample * finite).sum(-1), -(probs * finite).sum(-1)
        if self.expected:
            soft = soft_draws < self.expected
            sample = torch.where(soft[..., None], probs, sample)
            log_prob = log_prob.masked_fill(soft, 0.0)
        return Normalized(sample, log_prob=log_prob, entropy=entropy)


class GumbelNormalizer(Normalizer):
    """One position: sampled by the Gumbel-max trick in training, with the gradient of softmax((log p + noise) /
    temperature) passed straight through; the most probable one otherwise   (Jang et al. 2017, 2.2)."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        drop = ~keep
        masked = _masked(energies, drop)
        if not self.training:
            return Normalized(_one_hot(masked, drop))
        noisy = masked + _gumbel_noise(masked)
        soft = torch.softmax(noisy / self.temperature, dim=-1).masked_fill(drop, 0.0)
        return Normalized(_one_hot(noisy, drop) + (soft - soft.detach()))


def _masked(energies: Tensor, drop: Tensor) -> Tensor:
    """In float32 or wider. The lowest finite number instead of -inf avoids NaN in rows without any position."""
    energies = wide(energies)
    return energies.masked_fill(drop, torch.finfo(energies.dtype).min)


def _one_hot(energies: Tensor, drop: Tensor) -> Tensor:
    """1 at the greatest energy of each row, unless `drop` excludes it."""
    best = energies.argmax(-1, keepdim=True)
    return torch.zeros_like(energies).scatter_(-1, best, 1.0).masked_fill(drop, 0.0)


def _sampled(probs: Tensor, drop: Tensor, uniform: Tensor) -> Tensor:
    """One-hot draws (B, T, W) from rows of probabilities, by inverse transform sampling; zeros in a row that `drop`
    excludes as a whole. uniform: (B, T) in [0, 1)."""
    cdf = probs.detach().cumsum(-1, dtype=uniform.dtype)
    total = cdf[..., -1:]
    # The first position above the threshold. One that reaches the total is the last with a probability above 0.
    position = ((cdf <= uniform[..., None] * total) & (cdf < total)).sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, position, 1.0).masked_fill(drop, 0.0)


def _gumbel_noise(like: Tensor) -> Tensor:
    """-log of an exponential variate that is greater than 0."""
    return -torch.empty_like(like).exponential_().clamp_(min=torch.finfo(like.dtype).tiny).log_()
