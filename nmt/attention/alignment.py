"""Alignment: how an attention uses its distribution over source positions; and REINFORCE, which trains sampled ones.

Shapes: B batch, T target positions, W source positions of the window (S where it is global), Q query.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.normalizers import Normalized
from nmt.ops.draws import draw

MOMENTUM = 0.9  # of the mean reward (Xu et al. 2015, 4.1)


class Aligned(NamedTuple):
    """The weights of the context; of a sampled position also how it was sampled."""

    weights: Tensor  # (B, T, W)
    log_prob: Tensor | None = None  # (B, T) of the sampled position
    entropy: Tensor | None = None  # (B, T) of the distribution, in nats


class Choice(NamedTuple):
    """How hard attention sampled its positions, for REINFORCE."""

    log_prob: Tensor  # (B, T) of the sampled position (with heads: their sum); 0 where none was sampled
    entropy: Tensor  # (B, T) in nats, of the distribution it was sampled from
    query: Tensor  # (B, T, Q)


class Alignment(nn.Module):
    """Turns the distribution over positions into the weights of the context. The weights of a distribution sum to 1,
    also in a window that scales them.

    Here they are the distribution itself, for predictions that sum over source positions (nmt.model.latent).
    """

    def forward(self, distribution: Normalized) -> Aligned:
        """(B, T, W), a row of zeros where no position is kept -> weights (B, T, W)."""
        return Aligned(distribution.weights)


class SampledAlignment(Alignment):
    """One position: sampled in training, the most probable one otherwise   (Xu et al. 2015, 4.1).

    Sampling is not differentiable; `Policy` trains it. With probability `soft_share`, a step uses the distribution
    instead of a sample, which reduces the variance (ibid.).
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
    """Sample positions by inverse transform sampling: distributions (B, T, W), uniform numbers in [0, 1) (B, T) ->
    one-hot (B, T, W), zeros for a row of zeros."""
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
    """(B, T, W) -> 1 at the greatest score of each row, zeros in a row without a possible position."""
    best = scores.argmax(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, best, 1.0).masked_fill(impossible, 0.0)


def _gumbel_noise(like: Tensor) -> Tensor:
    """Draw -log of an exponential variate, which is kept above 0."""
    return -torch.empty_like(like).exponential_().clamp_(min=torch.finfo(like.dtype).tiny).log_()


class PolicyLoss(NamedTuple):
    """The terms of REINFORCE, summed over target tokens."""

    loss: Tensor  # () differentiable
    regression: Tensor  # () squared error of a learned baseline, which it alone trains; differentiable
    entropy: Tensor  # () in nats


class Policy(nn.Module):
    """REINFORCE: grad = E[sum_t (R_t - b_t) grad log p(s_t)], R_t = sum_{t' >= t} discount^(t' - t) log p(y_t' | ...)
    (Williams 1992; Xu et al. 2015, eq. 11 and 12).

    Unlike in the paper, R_t sums only the rewards from step t on: the same expected gradient with less variance. The
    baseline b_t is either learned, a linear function of the query, or moving, the running mean of a token's reward
    times the (discounted) number of remaining tokens.
    """

    mean_reward: Tensor

    def __init__(self, query_dim: int, baseline: str, *, discount: float, entropy_weight: float) -> None:
        """baseline: "learned" or "moving"."""
        super().__init__()
        self.discount, self.entropy_weight = discount, entropy_weight
        self.learned = nn.Linear(query_dim, 1) if baseline == "learned" else None
        if self.learned is None:
            self.register_buffer("mean_reward", torch.zeros(()))

    def forward(self, choice: Choice, log_probs: Tensor, real: Tensor) -> PolicyLoss:
        """Log-probabilities (B, T) of the target tokens, bool (B, T) False on padding -> PolicyLoss."""
        rewards = log_probs.detach().float().masked_fill(~real, 0.0)
        returns, ahead = self._to_go(rewards), self._to_go(real.float())
        if self.learned is None:
            baseline = self.mean_reward * ahead
        else:
            baseline = self.learned(choice.query.detach()).squeeze(-1).float()
        advantage = (returns - baseline.detach()).masked_fill(~real, 0.0)
        entropy = (choice.entropy * real).sum()
        loss = -(advantage * choice.log_prob).sum() - self.entropy_weight * entropy
        regression = loss.new_zeros(())
        if self.learned is not None:
            regression = ((returns - baseline).square() * real).sum()
        return PolicyLoss(loss, regression, entropy.detach())

    @torch.no_grad()
    def after_update(self, reward: Tensor) -> None:
        """Update the moving baseline with the mean reward () of a token in the whole batch."""
        if self.learned is None:
            self.mean_reward.lerp_(reward.to(self.mean_reward.dtype), 1 - MOMENTUM)

    def _to_go(self, rewards: Tensor) -> Tensor:
        """Sum rewards from each step on, discounted: (B, T) -> (B, T)."""
        sums = [rewards.new_zeros(rewards.shape[0])]
        for reward in reversed(rewards.unbind(1)):
            sums.append(reward + self.discount * sums[-1])
        return torch.stack(sums[:0:-1], dim=1)
