"""Alignment: what an attention does with its distribution over source positions.

Shapes: B batch, T target positions, W source positions of the window (S where it is global).
"""

import torch
from torch import Tensor

from nmt.attention.parts import Aligned, Alignment, Normalized
from nmt.ops.sentence_draws import draw


class ExpectedAlignment(Alignment):
    """Soft attention: the context is the mean over the distribution (Bahdanau et al. 2015, eq. 5)."""

    needs_distribution = False

    def forward(self, distribution: Normalized) -> Aligned:
        """(B, T, W) -> the same weights."""
        return Aligned(distribution.weights)


class LatentAlignment(ExpectedAlignment):
    """The context is the mean, as in soft attention, and each prediction is a sum over source positions
    (nmt.model.latent.mixture)."""

    needs_distribution = True


class SampledAlignment(Alignment):
    """One position: sampled in training, the most probable one otherwise   (Xu et al. 2015, 4.1).

    Sampling is not differentiable; nmt.attention.policy trains it by REINFORCE. With probability `soft_share`, a
    step uses the distribution instead of a sample, which reduces the variance (ibid.).
    """

    def __init__(self, soft_share: float) -> None:
        super().__init__()
        self.soft_share = soft_share

    def forward(self, distribution: Normalized) -> Aligned:
        """(B, T, W) -> weights (B, T, W), in training with log_prob and entropy (B, T)."""
        probs = distribution.weights
        if not self.training:
            return Aligned(_one_hot(probs, probs == 0))
        B, T, _ = probs.shape
        position_draws, soft_draws = draw(B, 2 * T, probs.device).view(B, T, 2).unbind(-1)
        log_probs = _finite_logs(distribution)
        sample = sample_positions(probs, position_draws)
        log_prob, entropy = (sample * log_probs).sum(-1), -(probs * log_probs).sum(-1)
        if self.soft_share:
            soft = soft_draws < self.soft_share
            sample = torch.where(soft[..., None], probs, sample)
            log_prob = log_prob.masked_fill(soft, 0.0)
        return Aligned(sample, log_prob, entropy)


class StraightThroughAlignment(Alignment):
    """One position: sampled by the Gumbel-max trick in training, with the gradient of softmax((log p + noise) /
    temperature) passed straight through; the most probable one otherwise   (Jang et al. 2017, 2.2)."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, distribution: Normalized) -> Aligned:
        """(B, T, W) -> weights (B, T, W)."""
        probs = distribution.weights
        impossible = probs == 0
        if not self.training:
            return Aligned(_one_hot(probs, impossible))
        noisy = _finite_logs(distribution) + _gumbel_noise(probs)
        noisy = noisy.masked_fill(impossible, torch.finfo(noisy.dtype).min)
        soft = torch.softmax(noisy / self.temperature, dim=-1).masked_fill(impossible, 0.0)
        return Aligned(_one_hot(noisy, impossible) + (soft - soft.detach()))


def sample_positions(probs: Tensor, uniform: Tensor) -> Tensor:
    """One-hot draws (B, T, W) from distributions, by inverse transform sampling; zeros for a row of zeros.
    uniform: (B, T) in [0, 1)."""
    cdf = probs.detach().cumsum(-1, dtype=uniform.dtype)
    total = cdf[..., -1:]
    # The first position above the threshold. One that reaches the total is the last with a probability above 0.
    position = ((cdf <= uniform[..., None]) & (cdf < total)).sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, position, 1.0).masked_fill(total == 0, 0.0)


def _finite_logs(distribution: Normalized) -> Tensor:
    """log p, finite where p is 0."""
    weights, log_weights = distribution
    if log_weights is not None:
        return log_weights.masked_fill(weights == 0, 0.0)
    return (weights + torch.finfo(weights.dtype).tiny).log()


def _one_hot(scores: Tensor, impossible: Tensor) -> Tensor:
    """1 at the greatest score of each row, 0 in a row without a possible position."""
    best = scores.argmax(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, best, 1.0).masked_fill(impossible, 0.0)


def _gumbel_noise(like: Tensor) -> Tensor:
    """-log of an exponential variate that is greater than 0."""
    return -torch.empty_like(like).exponential_().clamp_(min=torch.finfo(like.dtype).tiny).log_()
