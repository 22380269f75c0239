"""What training minimises: a loss on the target tokens, or the risk of whole translations, and auxiliary losses.

Shapes: B batch, T target positions.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from nmt.config.schema import TrainConfig
from nmt.config.schema import training as schema
from nmt.config.schema.attention import Hard, LinearCoverage, ScoredAttention
from nmt.data.batching import Batch
from nmt.data.tokenizer import Tokenizer
from nmt.model.seq2seq import Seq2Seq
from nmt.objectives.auxiliary import Auxiliary, CoverageLoss, GuidedAlignment, PolicyGradient
from nmt.objectives.minimum_risk import MinimumRisk
from nmt.objectives.scheduled_sampling import ScheduledSampling
from nmt.objectives.token_losses import Distillation, TokenLoss, distillation, likelihood, r_drop


class Value(NamedTuple):
    """Sums over target tokens, in nats. A risk is the mean over sentences times the number of target tokens."""

    total: Tensor  # () to minimise; differentiable
    terms: dict[str, Tensor]  # () each, before weighting: loss, smoothed_loss, then those of what else is minimised


class Objective:
    """The objective of a configuration for one batch after the other. `teachers` are those of a distillation."""

    def __init__(
        self, model: Seq2Seq, config: TrainConfig, target: Tokenizer, teachers: Sequence[Seq2Seq] = ()
    ) -> None:
        self.model, self.loss = model, build_token_loss(model, config, target.pad, teachers)
        self.auxiliary = build_auxiliary(model, config, target.pad)
        self.risk: MinimumRisk | None = None
        if isinstance(config.objective, schema.MinimumRisk):
            self.risk = MinimumRisk(self.loss, config.objective, target)
        self.scheduled: ScheduledSampling | None = None
        if config.training.scheduled_sampling:
            steps = config.training.scheduled_sampling_steps
            self.scheduled = ScheduledSampling(model, config.training.scheduled_sampling, steps, target)

    def __call__(self, batch: Batch, step: int, tokens_per_sentence: float | None = None) -> Value:
        """The objective for a batch on the model's device, in update number `step` (from 1).

        tokens_per_sentence: mean number of target tokens, of the whole update if the batch is only a part of it.
        """
        if self.scheduled is not None:
            batch = self.scheduled(batch, step)
        if self.risk is None:
            prediction, risk = self.loss(batch), None
        else:
            prediction, risk = self.risk(batch)
        total = prediction.total
        terms = {name: term.sum() for name, term in prediction.terms.items()}
        if self.risk is not None and risk is not None:
            terms["risk"] = risk * (tokens_per_sentence or batch.target_tokens / len(batch.indices))
            total = self.risk.config.likelihood_weight * total + terms["risk"] / self.risk.config.sharpness
        for auxiliary in self.auxiliary:
            added = auxiliary(prediction, step)
            total = total + added.total / prediction.copies
            terms |= {name: term / prediction.copies for name, term in added.terms.items()}
        return Value(total, {name: term.detach() for name, term in terms.items()})


def build_token_loss(model: Seq2Seq, config: TrainConfig, pad: int, teachers: Sequence[Seq2Seq] = ()) -> TokenLoss:
    """The loss on target tokens that the configuration chooses."""
    objective, smoothing = config.objective, config.training.label_smoothing
    if isinstance(objective, schema.Distillation):
        criterion = partial(distillation, teacher_weight=objective.teacher_weight, smoothing=smoothing)
        return Distillation(model, pad, criterion, teachers)
    if config.training.r_drop:
        return TokenLoss(model, pad, partial(r_drop, alpha=config.training.r_drop, smoothing=smoothing), copies=2)
    return TokenLoss(model, pad, partial(likelihood, smoothing=smoothing))


def build_auxiliary(model: Seq2Seq, config: TrainConfig, pad: int) -> list[Auxiliary]:
    """The losses that the configuration adds. Guided alignment makes the model's attention return log-weights."""
    losses: list[Auxiliary] = []
    if isinstance(config.attention, ScoredAttention):
        coverage, normalizer = config.attention.coverage, config.attention.normalizer
        if isinstance(coverage, LinearCoverage) and coverage.loss_weight:
            losses.append(CoverageLoss(coverage.loss_weight, coverage.loss_start, pad))
        if isinstance(normalizer, Hard) and normalizer.weight:
            assert model.policy is not None
            losses.append(PolicyGradient(normalizer.weight, model.policy, pad))
    if config.training.guided_alignment:
        model.record_log_weights()
        losses.append(GuidedAlignment(config.training.guided_alignment))
    return losses
