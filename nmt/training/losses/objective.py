"""What training minimises: a loss on the target tokens, and auxiliary losses.

Shapes: B batch, T target positions.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.config.schema import TrainConfig
from nmt.config.schema import training as schema
from nmt.config.schema.model import LinearCoverage, Sampled, ScoredAttention, Variational
from nmt.data.batching import Batch
from nmt.data.tokenizer import Tokenizer
from nmt.model.prediction import Prediction
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import SentenceDraws, draw, sentence_draws, sentence_keys
from nmt.training.losses.auxiliary import (
    Auxiliary,
    CoverageLoss,
    Divergence,
    GuidedAlignment,
    InferenceGradient,
    PolicyGradient,
)
from nmt.training.losses.token_losses import Distillation, TokenLoss, likelihood, r_drop


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
    """The objective of a configuration for one batch after the other. `teachers` are those of a distillation."""

    def __init__(
        self, model: Seq2Seq, config: TrainConfig, target: Tokenizer, teachers: Sequence[Seq2Seq] = ()
    ) -> None:
        self.seed = config.seed
        self.model, self.loss = model, build_token_loss(model, config, target.pad, teachers)
        self.auxiliary = build_auxiliary(model, config, self.loss)
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
    """The losses that the configuration adds. Guided alignment makes the model's attention return log-weights."""
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
        model.record_log_weights()
        losses.append(GuidedAlignment(config.training.guided_alignment))
    return losses
