"""Losses that are added to that of the target tokens: on the attention weights, and of a hard attention's policy.

Shapes: B batch, S source positions, T target positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nmt.attention.policy import Policy
from nmt.objectives.token_losses import Prediction


class AddedLoss(NamedTuple):
    """Sums over the target tokens of a prediction."""

    total: Tensor  # () weighted, to minimise
    terms: dict[str, Tensor]  # () each, before weighting


class CoverageLoss(NamedTuple):
    """Penalises attending to the same source position again   (See et al. 2017, eq. 12)."""

    weight: float
    start: int  # the number of updates without it
    pad: int

    def __call__(self, prediction: Prediction, step: int) -> AddedLoss:
        """`step`: the number of the update, from 1."""
        assert prediction.decoded.weights is not None
        loss = coverage_loss(prediction.decoded.weights, prediction.batch.target_out != self.pad)
        total = self.weight * loss if step > self.start else torch.zeros_like(loss)
        return AddedLoss(total, {"coverage_loss": loss})


class GuidedAlignment(NamedTuple):
    """Pulls the attention towards given word alignments   (Chen et al. 2016, with cross-entropy)."""

    weight: float

    def __call__(self, prediction: Prediction, step: int) -> AddedLoss:
        """The same at every `step`."""
        assert prediction.decoded.log_weights is not None
        assert prediction.batch.alignment is not None
        loss = guided_alignment_loss(prediction.decoded.log_weights, prediction.batch.alignment)
        return AddedLoss(self.weight * loss, {"alignment_loss": loss})


class PolicyGradient(NamedTuple):
    """Trains the positions that a hard attention samples: REINFORCE, with the tokens' log-likelihood as the reward."""

    weight: float
    policy: Policy
    pad: int

    def __call__(self, prediction: Prediction, step: int) -> AddedLoss:
        """The same at every `step`. A learned baseline is trained beside it, with weight 1."""
        assert prediction.decoded.choice is not None
        counted = prediction.batch.target_out != self.pad
        result = self.policy(prediction.decoded.choice, -prediction.terms["loss"], counted)
        terms = {"policy_loss": result.loss, "policy_entropy": result.entropy}
        return AddedLoss(self.weight * result.loss + result.regression, terms)


Auxiliary = CoverageLoss | GuidedAlignment | PolicyGradient


def coverage_loss(weights: Tensor, counted: Tensor) -> Tensor:
    """sum_t sum_s min(w_ts, c_ts), c_ts the sum of the weights before t: (B, T, S), bool (B, T) -> ()."""
    covered = weights.cumsum(1) - weights
    return (torch.minimum(weights, covered).sum(-1) * counted).sum()


def guided_alignment_loss(log_weights: Tensor, alignment: Tensor) -> Tensor:
    """-sum_t sum_s a_ts log w_ts: (B, T, S), (B, T, S) -> (). A row of the alignment sums to 1, or to 0 if the target
    token is not aligned.

    Takes log-weights, because the gradient of log w is 1 / w: it would be NaN for a weight that underflows.
    """
    # Outside a window the weight is exactly 0 and cannot be raised by any gradient, so these positions do not count.
    return -(alignment * log_weights.masked_fill(log_weights == -torch.inf, 0.0)).sum()
