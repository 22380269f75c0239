"""REINFORCE for hard attention: positions that made the target tokens likely are sampled more often.

Shapes: B batch, T target positions, Q query.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.memory import Choice

MOMENTUM = 0.9  # of the moving mean (Xu et al. 2015, 4.1)


class PolicyLoss(NamedTuple):
    """Sums over target tokens."""

    loss: Tensor  # () differentiable
    regression: Tensor  # () squared error of a learned baseline, trains only that; differentiable
    entropy: Tensor  # () in nats


class Policy(nn.Module):
    """grad = E[sum_t (R_t - b_t) grad log p(s_t)], R_t = sum_{t' >= t} discount^(t' - t) log p(y_t' | ...)
    (Williams 1992; Xu et al. 2015, eq. 11 and 12; here only rewards after the sample, which has the same
    expectation).

    The baseline b_t is either learned, a linear function of the query, or moving, the running mean of a token's reward
    times the (discounted) number of remaining tokens.
    """

    mean_reward: Tensor

    def __init__(
        self,
        query_dim: int,
        baseline: str,
        *,
        discount: float,
        entropy_weight: float,
    ) -> None:
        super().__init__()
        self.discount, self.entropy_weight = discount, entropy_weight
        self.learned = nn.Linear(query_dim, 1) if baseline == "learned" else None
        if self.learned is None:
            self.register_buffer("mean_reward", torch.zeros(()))

    def forward(self, choice: Choice, log_probs: Tensor, real: Tensor) -> PolicyLoss:
        """log_probs (B, T) of the target tokens, bool (B, T) False on padding -> PolicyLoss."""
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
        """(B, T) -> (B, T), the discounted sum from each step on."""
        sums = [rewards.new_zeros(rewards.shape[0])]
        for reward in reversed(rewards.unbind(1)):
            sums.append(reward + self.discount * sums[-1])
        return torch.stack(sums[:0:-1], dim=1)
