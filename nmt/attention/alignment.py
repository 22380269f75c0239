"""Alignment: from an attention's distribution over source positions to the weights of the context. Hard attention
samples one position from the distribution; REINFORCE (`Policy`) trains it.

Shapes: B batch, T target positions, W source positions in the window (all S if it is global), Q size of a query.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.normalizers import Normalized
from nmt.ops.draws import draw

MOMENTUM = 0.9  # share that the running mean reward keeps at each update (Xu et al. 2015, 4.1)


class Aligned(NamedTuple):
    """The weights of the context. `Policy` reads the other fields, which are None unless REINFORCE trains the
    weights."""

    weights: Tensor  # (B, T, W)
    log_prob: Tensor | None = None  # (B, T) log-probability of the sampled position
    entropy: Tensor | None = None  # (B, T) entropy of the distribution, in nats

    def for_reinforce(self, query: Tensor) -> "Choice | None":
        """Return what REINFORCE needs to know; query: (B, T, Q). None if it does not train the weights."""
        return None if self.log_prob is None or self.entropy is None else Choice(self.log_prob, self.entropy, query)


class Choice(NamedTuple):
    """What REINFORCE needs to know about the positions that hard attention sampled."""

    log_prob: Tensor  # (B, T) log-probability of the sampled position, summed over heads; 0 without a sample
    entropy: Tensor  # (B, T) entropy of the distribution in nats, summed over heads
    query: Tensor  # (B, T, Q), from which a learned baseline is computed


class Alignment(nn.Module):
    """Turns the distribution over positions into the weights of the context.

    If the factors of a window scale the distribution, `Attention` first makes the distribution sum to 1 again. This
    base class, which returns the distribution unchanged, is for predictions that sum over source positions
    (nmt.model.latent).
    """

    def forward(self, distribution: Normalized) -> Aligned:
        """Compute weights (B, T, W) from a distribution (B, T, W). A row without valid positions stays 0."""
        return Aligned(distribution.weights)


class SampledAlignment(Alignment):
    """Chooses one position: a sample in training, else the most probable position   (Xu et al. 2015, 4.1).

    Sampling is not differentiable; therefore `Policy` trains the distribution. In training, each target position has
    the probability `soft_share` of using the whole distribution instead of a sample, which reduces the variance of the
    gradient (ibid.).
    """

    def __init__(self, soft_share: float) -> None:
        super().__init__()
        self.soft_share = soft_share

    def forward(self, distribution: Normalized) -> Aligned:
        """Compute weights (B, T, W) from a distribution (B, T, W); in training, also log_prob and entropy (B, T)."""
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
    """Chooses one position: a sample by the Gumbel-max trick in training, else the most probable position
    (Jang et al. 2017, 2.2).

    The weights are one-hot, but have the gradient of softmax((log p + noise) / temperature), where p is the
    distribution and the noise is the Gumbel noise that chose the position.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, distribution: Normalized) -> Aligned:
        probs = distribution.weights
        impossible = probs == 0
        if not self.training:
            return Aligned(_one_hot(probs, impossible))
        # Gumbel noise is -log x of an exponential variate x, kept above 0 so that the logarithm is finite.
        variates = torch.empty_like(probs).exponential_().clamp_(min=torch.finfo(probs.dtype).tiny)
        noisy = _finite_logs(distribution) - variates.log_()
        noisy = noisy.masked_fill(impossible, torch.finfo(noisy.dtype).min)
        soft = torch.softmax(noisy / self.temperature, dim=-1).masked_fill(impossible, 0.0)
        return Aligned(_one_hot(noisy, impossible) + (soft - soft.detach()))


def sample_positions(probs: Tensor, uniform: Tensor) -> Tensor:
    """Sample positions by inverse transform sampling: distributions (B, T, W), uniform numbers in [0, 1) (B, T) ->
    one-hot (B, T, W). For a row of zeros, the result is a row of zeros."""
    cdf = probs.detach().cumsum(-1, dtype=uniform.dtype)
    total = cdf[..., -1:]
    # Take the first position whose cumulative probability exceeds the uniform number. If rounding leaves even the total
    # below that number, take the position where the total is reached, the last one with a probability above 0.
    position = ((cdf <= uniform[..., None]) & (cdf < total)).sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, position, 1.0).masked_fill(total == 0, 0.0)


def _finite_logs(distribution: Normalized) -> Tensor:
    """Compute log p. Where p is 0, the result is some finite number, so that p log p is 0."""
    weights, log_weights = distribution
    if log_weights is not None:
        return log_weights.masked_fill(weights == 0, 0.0)
    return (weights + torch.finfo(weights.dtype).tiny).log()


def _one_hot(scores: Tensor, impossible: Tensor) -> Tensor:
    """Set 1 at the greatest score of each row: (B, T, W), bool (B, T, W) -> (B, T, W). A row without a possible
    position becomes a row of zeros."""
    best = scores.argmax(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, best, 1.0).masked_fill(impossible, 0.0)


class PolicyLoss(NamedTuple):
    """The loss terms of REINFORCE, summed over target tokens."""

    loss: Tensor  # () to minimise: the sum of -(R_t - b_t) log p(s_t), minus entropy_weight times the entropy
    regression: Tensor  # () squared error, which trains a learned baseline; 0 for a moving baseline
    entropy: Tensor  # () entropy of the distributions in nats, only reported; without a gradient


class Policy(nn.Module):
    """Trains the distribution of sampled positions s_t by REINFORCE: grad = E[sum_t (R_t - b_t) grad log p(s_t)], with
    the return R_t = sum_{t' >= t} discount^(t' - t) log p(y_t' | ...)   (Williams 1992; Xu et al. 2015, eq. 11 and 12).

    The reward of a target token y_t is its log-probability; for label smoothing, see `PolicyGradient`. Unlike in the
    paper, R_t sums only the rewards from step t on, which gives the same expected gradient with less variance.

    The baseline b_t is either learned or moving. A learned baseline is a linear function of the query. A moving
    baseline is the running mean reward of a token, times the discounted number of remaining tokens, sum_{t' >= t}
    discount^(t' - t). Both start near the reward of a model that knows nothing, the log-probability of a uniform guess.
    """

    mean_reward: Tensor  # () mean reward of a token, for a moving baseline

    def __init__(
        self, query_dim: int, baseline: str, *, vocabulary: int, discount: float, entropy_weight: float
    ) -> None:
        """baseline: "learned" or "moving". vocabulary: number of target tokens. entropy_weight: factor of the
        distribution's entropy, which is subtracted from the loss."""
        super().__init__()
        self.discount, self.entropy_weight = discount, entropy_weight
        self.learned = nn.Linear(query_dim, 1) if baseline == "learned" else None
        guess = -math.log(vocabulary)
        if self.learned is None:
            self.register_buffer("mean_reward", torch.tensor(guess))
        else:
            nn.init.constant_(self.learned.bias, guess)

    def forward(self, choice: Choice, log_probs: Tensor, real: Tensor) -> PolicyLoss:
        """Compute the loss terms. log_probs: (B, T), the rewards of the target tokens; real: bool (B, T), False at
        padding."""
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
        """Update the baseline, if it is a moving one. reward: (), the mean reward of a token in the whole batch."""
        if self.learned is None:
            self.mean_reward.lerp_(reward.to(self.mean_reward.dtype), 1 - MOMENTUM)

    def _to_go(self, rewards: Tensor) -> Tensor:
        """Sum the discounted rewards from each step to the end: (B, T) -> (B, T)."""
        sums = [rewards.new_zeros(rewards.shape[0])]
        for reward in reversed(rewards.unbind(1)):
            sums.append(reward + self.discount * sums[-1])
        return torch.stack(sums[:0:-1], dim=1)
