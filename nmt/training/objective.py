"""What training minimises: the likelihood, the risk or the divergence from teachers, and what the attention adds to it.

Shapes: B batch, S source positions, T target positions, N target tokens without padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from nmt.attention.losses import coverage_loss, guided_alignment_loss
from nmt.attention.policy import PolicyLoss
from nmt.config import schema
from nmt.data.batching import Batch
from nmt.data.tokenizer import Tokenizer
from nmt.model.decoder import Decoded
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.cross_entropy import Loss
from nmt.training.distillation import distillation_loss
from nmt.training.minimum_risk import MinimumRisk
from nmt.training.r_drop import r_drop_loss, twice
from nmt.training.scheduled_sampling import ScheduledSampling


class Value(NamedTuple):
    """Sums over target tokens, in nats; a risk is a mean over sentences, times the tokens."""

    total: Tensor  # () what is minimised; differentiable
    terms: dict[str, Tensor]  # () each, detached: loss, smoothed_loss, and what else is added, before weighting


class Objective:
    """The objective of a configuration, batch by batch. `teachers`: those of a distillation, on the model's device."""

    def __init__(
        self, model: Seq2Seq, config: schema.TrainConfig, target: Tokenizer, teachers: Sequence[Seq2Seq] = ()
    ) -> None:
        self.model, self.pad, self.teachers = model, target.pad, teachers
        self.share = config.objective.teacher_weight if isinstance(config.objective, schema.Distillation) else 0.0
        self.risk: MinimumRisk | None = None
        self.likelihood, self.sharpness = 1.0, 1.0
        if isinstance(config.objective, schema.MinimumRisk):
            self.risk = MinimumRisk(model, config.objective, target)
            self.likelihood, self.sharpness = config.objective.likelihood_weight, config.objective.sharpness
        self.smoothing = config.training.label_smoothing
        self.r_drop = config.training.r_drop
        self.scheduled: ScheduledSampling | None = None
        if config.training.scheduled_sampling:
            steps = config.training.scheduled_sampling_steps
            self.scheduled = ScheduledSampling(model, config.training.scheduled_sampling, steps, target)
        self.guided = config.training.guided_alignment
        if self.guided:
            model.record_log_weights()
        self.coverage, self.coverage_start, self.policy = 0.0, 0, 0.0
        if isinstance(config.attention, schema.ScoredAttention):
            coverage, normalizer = config.attention.coverage, config.attention.normalizer
            if isinstance(coverage, schema.LinearCoverage):
                self.coverage, self.coverage_start = coverage.loss_weight, coverage.loss_start
            self.policy = normalizer.weight if isinstance(normalizer, schema.Hard) else 0.0

    def __call__(self, batch: Batch, step: int, tokens_per_sentence: float | None = None) -> Value:
        """Of a batch on the model's device, for the update number `step`, from 1.

        `tokens_per_sentence`: target tokens in the mean; of the whole update where the batch is a part of it.
        """
        if self.scheduled is not None:
            batch = self.scheduled(batch, step)
        copies = 2 if self.r_drop else 1
        if self.r_drop:
            batch = twice(batch)
        decoded: Decoded
        if self.risk is None:
            decoded = self.model(batch.source, batch.lengths, batch.target_in)
            total, terms = self._likelihood(decoded, batch)
        else:
            decoded, risk = self.risk(batch)
            total, terms = self._likelihood(decoded, batch)
            terms["risk"] = risk * (tokens_per_sentence or batch.target_tokens / len(batch.indices))
            total = self.likelihood * total + terms["risk"] / self.sharpness
        if self.coverage:
            assert decoded.weights is not None
            terms["coverage_loss"] = coverage_loss(decoded.weights, batch.target_out != self.pad) / copies
            if step > self.coverage_start:
                total = total + self.coverage * terms["coverage_loss"]
        if self.guided:
            assert decoded.log_weights is not None
            assert batch.alignment is not None
            terms["alignment_loss"] = guided_alignment_loss(decoded.log_weights, batch.alignment) / copies
            total = total + self.guided * terms["alignment_loss"]
        return Value(total, {name: term.detach() for name, term in terms.items()})

    def _likelihood(self, decoded: Decoded, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """What is made of the probabilities of the right tokens: a sum that is minimised, and the terms."""
        if self.r_drop:
            both = r_drop_loss(self.model, decoded.readouts, batch.target_out, self.pad, self.r_drop, self.smoothing)
            return both.total, {"loss": both.nll, "smoothed_loss": both.smoothed, "r_drop_loss": both.divergence}
        if self.share:
            taught = distillation_loss(
                self.model, self.teachers, decoded.readouts, batch, self.pad, self.share, self.smoothing
            )
            parts = {"loss": taught.nll, "smoothed_loss": taught.smoothed, "distillation_loss": taught.divergence}
            return taught.total, parts
        loss = self.model.loss(decoded.readouts, batch.target_out, self.pad, self.smoothing)
        total, terms = loss.smoothed, {"loss": loss.nll, "smoothed_loss": loss.smoothed}
        if self.policy:
            found = self._policy(decoded, loss, batch.target_out != self.pad)
            terms["policy_loss"], terms["policy_entropy"] = found.loss, found.entropy
            total = total + self.policy * found.loss + found.regression
        return total, terms

    def _policy(self, decoded: Decoded, loss: Loss, real: Tensor) -> PolicyLoss:
        assert self.model.policy is not None
        assert decoded.choice is not None
        found: PolicyLoss = self.model.policy(decoded.choice, loss.log_probs, real)
        return found
