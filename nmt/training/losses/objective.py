"""What training minimises: a loss on the target tokens, and auxiliary losses on the attention weights, of sampled
positions and of an inference network.

Shapes: B batch, S source positions, T target positions.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.attention.alignment import Policy
from nmt.config.schema import TrainConfig
from nmt.config.schema import training as schema
from nmt.config.schema.model import LinearCoverage, Sampled, ScoredAttention, Variational
from nmt.data.batching import Batch
from nmt.data.tokenizer import Tokenizer
from nmt.model.prediction import Prediction, Readouts
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import SentenceDraws, draw, sentence_draws, sentence_keys
from nmt.training.losses.token_losses import Distillation, TokenLoss, TokenPrediction, likelihood, r_drop


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
    loss of the tokens it is the negative evidence lower bound   (Deng et al. 2018, 3)."""

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
    reward and that of soft attention as the baseline   (Deng et al. 2018, eq. 1, without label smoothing).

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


class Value(NamedTuple):
    """Sums over target tokens, in nats."""

    total: Tensor  # () to minimise; differentiable
    terms: dict[str, Tensor]  # () each, before weighting: loss, smoothed_loss, then those of what else is minimised


class ScheduledSampling:
    """Replaces the decoder's previous tokens by predictions, with a probability that rises linearly   (Bengio et al.
    2015, 2.4).

    Two passes serve every decoder and attention (Mihaylova and Martins 2019). The first reads the reference and
    predicts every token, without gradient. The second, which is trained, reads a mixture of reference and predictions.
    """

    def __init__(self, model: Seq2Seq, probability: float, steps: int, target: Tokenizer) -> None:
        """The final `probability` is reached after `steps` updates."""
        self.model, self.final, self.steps, self.pad = model, probability, steps, target.pad
        self.banned = torch.tensor([target.pad, target.bos], device=model.output.bias.device)

    def probability(self, step: int) -> float:
        """The probability of replacing an input in update number `step`, from 1."""
        return self.final * min(1.0, step / self.steps)

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch with some inputs of the decoder replaced; <s> and padding stay."""
        first, reference = batch.target_in[:, :1], batch.target_in[:, 1:]
        B, T = reference.shape
        chosen = draw(B, T, reference.device) < self.probability(step)
        mixed = torch.where(chosen & (reference != self.pad), self._predictions(batch)[:, :-1], reference)
        return batch._replace(target_in=torch.cat([first, mixed], dim=1))

    @torch.no_grad()
    def _predictions(self, batch: Batch) -> Tensor:
        """int64 (B, T): the most probable token at each position, without dropout."""
        self.model.eval()
        prediction: Prediction = self.model(batch.source, batch.lengths, batch.target_in).prediction
        self.model.train()
        torch.clear_autocast_cache()  # before 2.10, torch would reuse these casts, which have no gradient, in training
        return prediction.most_probable(self.model.output.layer(), self.banned)


class Objective:
    """The objective of a configuration for one batch after the other.

    Makes the model's attention return log-weights if guided alignment reads them.
    """

    def __init__(
        self, model: Seq2Seq, config: TrainConfig, target: Tokenizer, teachers: Sequence[Seq2Seq] = ()
    ) -> None:
        """teachers: those of a distillation."""
        self.seed = config.seed
        self.model, self.loss = model, build_token_loss(model, config, target.pad, teachers)
        self.auxiliary = build_auxiliary(model, config, self.loss)
        if any(isinstance(auxiliary, GuidedAlignment) for auxiliary in self.auxiliary):
            model.record_log_weights()
        self.scheduled: ScheduledSampling | None = None
        if config.training.scheduled_sampling:
            steps = config.training.scheduled_sampling_steps
            self.scheduled = ScheduledSampling(model, config.training.scheduled_sampling, steps, target)

    def can_be_recorded(self, step: int) -> bool:
        """May the passes of update number `step` be recorded for later updates? Only if all batches of one shape run
        the same kernels on nothing but their own tensors. Positions sampled for a sentence depend on its number."""
        fixed = self.loss.can_be_recorded and self.scheduled is None
        return fixed and all(auxiliary.can_be_recorded(step) for auxiliary in self.auxiliary)

    def __call__(self, batch: Batch, step: int) -> Value:
        """The objective for a batch on the model's device, in update number `step` (from 1)."""
        with sentence_draws(SentenceDraws(lambda: sentence_keys((self.seed, step), batch.indices))):
            if self.scheduled is not None:
                batch = self.scheduled(batch, step)
            prediction = self.loss(batch)
        total = prediction.total
        terms = {name: term.sum() for name, term in prediction.terms.items()}
        for auxiliary in self.auxiliary:
            added = auxiliary(prediction, step)
            total = total + added.total / prediction.passes
            terms |= {name: term / prediction.passes for name, term in added.terms.items()}
        return Value(total, {name: term.detach() for name, term in terms.items()})

    def after_update(self, terms: Mapping[str, Tensor], tokens: int) -> None:
        """Call this with the terms and target tokens of the whole batch after each update."""
        if self.model.policy is not None:
            self.model.policy.after_update(-self.loss.minimised(dict(terms)) / tokens)


def build_token_loss(model: Seq2Seq, config: TrainConfig, pad: int, teachers: Sequence[Seq2Seq] = ()) -> TokenLoss:
    """The loss on target tokens that the configuration chooses."""
    objective, smoothing = config.objective, config.training.label_smoothing
    if isinstance(objective, schema.Distillation):
        return Distillation(model, pad, teachers, objective.teacher_weight, smoothing)
    if config.training.r_drop:
        return TokenLoss(model, pad, partial(r_drop, alpha=config.training.r_drop, smoothing=smoothing), passes=2)
    return TokenLoss(model, pad, partial(likelihood, smoothing=smoothing))


def build_auxiliary(model: Seq2Seq, config: TrainConfig, loss: TokenLoss) -> list[Auxiliary]:
    """Build the losses that the configuration adds."""
    losses, pad = list[Auxiliary](), loss.pad
    if isinstance(config.attention, ScoredAttention):
        coverage, alignment = config.attention.coverage, config.attention.alignment
        if isinstance(coverage, LinearCoverage) and coverage.loss_weight:
            losses.append(CoverageLoss(coverage.loss_weight, coverage.loss_start, pad))
        if isinstance(alignment, Sampled):
            assert model.policy is not None
            losses.append(PolicyGradient(alignment.weight, model.policy, loss))
        if isinstance(alignment, Variational):
            losses.append(Divergence(alignment.kl_weight, pad))
            if alignment.estimator == "sample":
                losses.append(InferenceGradient(loss, config.training.label_smoothing))
    if config.training.guided_alignment:
        losses.append(GuidedAlignment(config.training.guided_alignment))
    return losses
