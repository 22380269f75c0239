"""Losses that are added to that of the target tokens: on the attention weights, of sampled positions, and of an
inference network.

Shapes: B batch, S source positions, T target positions.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.attention.alignment import Policy
from nmt.model.prediction import Readouts
from nmt.training.losses.token_losses import TokenLoss, TokenPrediction, likelihood


class AddedLoss(NamedTuple):
    """Sums over the target tokens of a prediction."""

    total: Tensor  # () weighted, to minimise
    terms: dict[str, Tensor]  # () each, before weighting


class CoverageLoss(NamedTuple):
    """Penalises attending to the same source position again   (See et al. 2017, eq. 12)."""

    weight: float
    start: int  # the number of updates without it
    pad: int

    def __call__(self, prediction: TokenPrediction, step: int) -> AddedLoss:
        """`step`: the number of the update, from 1."""
        assert prediction.decoded.weights is not None
        loss = coverage_loss(prediction.decoded.weights, prediction.batch.target_out != self.pad)
        total = self.weight * loss if step > self.start else torch.zeros_like(loss)
        return AddedLoss(total, {"coverage_loss": loss})

    def can_be_recorded(self, step: int) -> bool:
        """See Objective.can_be_recorded."""
        return step > self.start


class GuidedAlignment(NamedTuple):
    """Pulls the attention towards given word alignments   (Chen et al. 2016, with cross-entropy)."""

    weight: float

    def __call__(self, prediction: TokenPrediction, step: int) -> AddedLoss:
        """The same at every `step`."""
        assert prediction.decoded.attention is not None
        assert prediction.decoded.attention.log_weights is not None
        assert prediction.batch.alignment is not None
        loss = guided_alignment_loss(prediction.decoded.attention.log_weights, prediction.batch.alignment)
        return AddedLoss(self.weight * loss, {"alignment_loss": loss})

    def can_be_recorded(self, step: int) -> bool:
        """See Objective.can_be_recorded."""
        return True


class PolicyGradient(NamedTuple):
    """Trains the positions that a hard attention samples: REINFORCE, with the negative loss of the tokens as the
    reward, so that positions and predictions minimise one expected loss. Without label smoothing, the reward is the
    log-likelihood."""

    weight: float
    policy: Policy
    loss: TokenLoss

    def __call__(self, prediction: TokenPrediction, step: int) -> AddedLoss:
        """The same at every `step`. A learned baseline is trained beside it, with weight 1."""
        assert prediction.decoded.attention is not None
        assert prediction.decoded.attention.choice is not None
        counted = prediction.batch.target_out != self.loss.pad
        result = self.policy(prediction.decoded.attention.choice, -self.loss.minimised(prediction.terms), counted)
        terms = {"policy_loss": result.loss, "policy_entropy": result.entropy}
        return AddedLoss(self.weight * result.loss + result.regression, terms)

    def can_be_recorded(self, step: int) -> bool:
        """See Objective.can_be_recorded."""
        return False


class Divergence(NamedTuple):
    """KL(q || a_t) between an inference network and the prior, exact for categorical distributions: with the expected
    loss of the tokens it is the negative evidence lower bound   (Deng et al. 2018, eq. 3)."""

    weight: float
    pad: int

    def __call__(self, prediction: TokenPrediction, step: int) -> AddedLoss:
        """The same at every `step`."""
        inferred, attention = prediction.decoded.inferred, prediction.decoded.attention
        assert inferred is not None
        assert attention is not None
        assert attention.log_weights is not None
        loss = divergence(inferred.log_probs, attention.log_weights, prediction.batch.target_out != self.pad)
        return AddedLoss(self.weight * loss, {"kl_loss": loss})

    def can_be_recorded(self, step: int) -> bool:
        """See Objective.can_be_recorded."""
        return True


class InferenceGradient(NamedTuple):
    """Trains an inference network by positions sampled from it: REINFORCE, with the negative loss of the token as the
    reward and that of soft attention as the baseline   (Deng et al. 2018, 4.1, without label smoothing).

    The reward is what the prediction minimises, so that the mean over samples is the gradient of the enumerated sum.
    """

    loss: TokenLoss
    smoothing: float

    def __call__(self, prediction: TokenPrediction, step: int) -> AddedLoss:
        """The same at every `step`."""
        decoded, targets = prediction.decoded, prediction.batch.target_out
        assert decoded.inferred is not None
        assert decoded.inferred.log_prob is not None
        model, pad = self.loss.model, self.loss.pad
        with torch.no_grad():
            criterion = partial(likelihood, smoothing=self.smoothing)
            soft = model.loss(Readouts(decoded.readouts.detach()), targets, pad, criterion).terms["smoothed_loss"]
        advantage = (soft - self.loss.minimised(prediction.terms)).masked_fill(targets == pad, 0.0)
        loss = -(advantage * decoded.inferred.log_prob).sum()
        return AddedLoss(loss, {"inference_loss": loss})

    def can_be_recorded(self, step: int) -> bool:
        """See Objective.can_be_recorded."""
        return False


Auxiliary = CoverageLoss | GuidedAlignment | PolicyGradient | Divergence | InferenceGradient


def divergence(log_q: Tensor, log_p: Tensor, counted: Tensor) -> Tensor:
    """sum_t sum_s q_ts (log q_ts - log p_ts): (B, T, S), (B, T, S), bool (B, T) -> (). Where p is 0, so is q."""
    inside = log_q != -torch.inf
    difference = torch.where(inside, log_q, 0.0) - torch.where(inside, log_p, 0.0)
    return ((log_q.exp() * difference).sum(-1) * counted).sum()


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
