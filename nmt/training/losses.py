"""What training minimises: a loss on the target tokens, and auxiliary losses on the attention weights, of sampled
positions and of an inference network.

A criterion is a plain, differentiable function of logits, in nats:

    logits (C, n, V) of C passes over a batch, int64 targets (n,)  ->  loss to minimise (n,), terms to report (n,)

The term "loss" is the negative log-likelihood of the target. Shapes: B batch, S source positions, T target positions,
R readout, V vocabulary, n target positions of a batch in a chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nmt.attention.alignment import Policy
from nmt.config.schema import TrainConfig
from nmt.config.schema import training as schema
from nmt.config.schema.model import LinearCoverage, Sampled, ScoredAttention, Variational
from nmt.data.batching import Batch
from nmt.model.decoder import Decoded
from nmt.model.prediction import Components, Readouts
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import SentenceDraws, copied_draws, sentence_draws, sentence_keys
from nmt.ops.layers import in_autocast_dtype
from nmt.ops.output_loss import Criterion, cross_entropy

Terms = dict[str, Tensor]


def likelihood(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Terms]:
    """(1, n, V): label-smoothed cross-entropy (Szegedy et al. 2016, section 7)."""
    smoothed, nll = cross_entropy(logits[0], targets, smoothing)
    return smoothed, {"loss": nll, "smoothed_loss": smoothed}


def r_drop(logits: Tensor, targets: Tensor, alpha: float, smoothing: float) -> tuple[Tensor, Terms]:
    """(2, n, V), two predictions with different dropout: half the loss of Liang et al. (2021, eq. 4), which is
    1/2 (CE_1 + CE_2) + alpha/2 * 1/2 (KL(p_1 || p_2) + KL(p_2 || p_1))."""
    log_probs = logits.log_softmax(-1)
    smoothed, nll = smoothed_nll(log_probs, targets.expand(2, -1), smoothing)
    divergence = (log_probs.exp().diff(dim=0) * log_probs.diff(dim=0)).sum((0, -1)) / 2
    terms = {"loss": nll.mean(0), "smoothed_loss": smoothed.mean(0), "r_drop_loss": divergence}
    return terms["smoothed_loss"] + alpha / 2 * divergence, terms


def distillation(
    logits: Tensor,
    targets: Tensor,
    *components: Tensor,
    output_layers: Sequence[tuple[Tensor, Tensor]],
    teacher_weight: float,
    smoothing: float,
) -> tuple[Tensor, Terms]:
    """(1, n, V): (1 - w) CE + w KL(q || p) with w the teachers' weight and q the mean of the teachers' distributions,
    from the components of each and their output layers (V, R), (V,)   (Kim and Rush 2016, 3.1; there without the
    entropy of q, which is constant)."""
    log_probs = logits[0].log_softmax(-1)
    smoothed, nll = smoothed_nll(log_probs, targets, smoothing)
    q = mean_probabilities(components, output_layers, log_probs.dtype)
    divergence = functional.kl_div(log_probs, q, reduction="none").sum(-1)  # summed last: two sums would cancel
    loss = (1 - teacher_weight) * smoothed + teacher_weight * divergence
    return loss, {"loss": nll, "smoothed_loss": smoothed, "distillation_loss": divergence}


def smoothed_nll(log_probs: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """(..., V), int64 (...) -> label-smoothed cross-entropy and negative log-likelihood (...)."""
    nll = -log_probs.gather(-1, targets[..., None])[..., 0]
    return (1 - smoothing) * nll - smoothing * log_probs.mean(-1), nll


@torch.no_grad()
def mean_probabilities(
    components: Sequence[Tensor], output_layers: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Tensor:
    """Average the predictions of several models, from the fields of their Components in turn and the output layers
    ((V, R), (V,)) -> (n, V)."""
    fields = len(Components._fields)
    starts = range(0, len(components), fields)
    models = zip((Components(*components[i : i + fields]) for i in starts), output_layers, strict=True)
    total, *others = (model.probabilities(*layer, dtype) for model, layer in models)
    for other in others:
        total += other
    return total.div_(len(output_layers))


class TokenPrediction(NamedTuple):
    """A batch, what the model predicts for it, and the loss of that."""

    batch: Batch  # with as many rows as were decoded
    decoded: Decoded
    total: Tensor  # () to minimise, summed over the target tokens
    terms: Terms  # (B, T) each, 0 on padding; detached
    passes: int = 1  # over each sentence of the batch


class TokenLoss:
    """Computes a criterion for each target token, given the source and the reference's previous tokens."""

    can_be_recorded = True  # see Objective.can_be_recorded

    def __init__(self, model: Seq2Seq, pad: int, criterion: Criterion, passes: int = 1) -> None:
        """passes: over the batch, computed as one; each has its own dropout masks."""
        self.model, self.pad, self.criterion, self.passes = model, pad, criterion, passes

    def __call__(self, batch: Batch) -> TokenPrediction:
        """Compute the loss of a batch on the model's device."""
        repeated = repeat(batch, self.passes)
        rows = torch.arange(len(repeated.source))
        with copied_draws(rows % len(batch.source), rows // len(batch.source)):
            decoded: Decoded = self.model(
                repeated.source, repeated.lengths, repeated.target_in, target_out=repeated.target_out
            )
        return self.of_decoded(repeated, decoded, batch.target_out)

    def of_decoded(self, batch: Batch, decoded: Decoded, targets: Tensor) -> TokenPrediction:
        """Compute the loss of what was decoded in all passes, for targets (B, T)."""
        criterion, inputs = self.with_inputs(batch)
        total, terms = self.model.loss(decoded.prediction, targets, self.pad, criterion, *inputs)
        return TokenPrediction(batch, decoded, total, terms, self.passes)

    def with_inputs(self, batch: Batch) -> tuple[Criterion, tuple[Tensor, ...]]:
        """Return the criterion for this batch and what else it reads, (B * T, ...) each."""
        return self.criterion, ()

    def minimised(self, terms: Terms) -> Tensor:
        """Return what the criterion minimises (B, T), from its terms (B, T): "smoothed_loss", if it reports one, else
        "loss"."""
        return terms.get("smoothed_loss", terms["loss"])


class Distillation(TokenLoss):
    """Learns from the predictions of teachers, which read the same batch without dropout."""

    can_be_recorded = False

    def __init__(
        self, model: Seq2Seq, pad: int, teachers: Sequence[Seq2Seq], teacher_weight: float, smoothing: float
    ) -> None:
        super().__init__(model, pad, partial(distillation, teacher_weight=teacher_weight, smoothing=smoothing))
        self.teachers, self.teacher_weight = teachers, teacher_weight

    def minimised(self, terms: Terms) -> Tensor:
        """See TokenLoss."""
        weight = self.teacher_weight
        return (1 - weight) * terms["smoothed_loss"] + weight * terms["distillation_loss"]

    @torch.no_grad()
    def with_inputs(self, batch: Batch) -> tuple[Criterion, tuple[Tensor, ...]]:
        """Return `distillation` with the teachers' output layers, and the components of their predictions."""
        layers: list[tuple[Tensor, Tensor]] = []
        inputs: list[Tensor] = []
        for teacher in self.teachers:
            decoded: Decoded = teacher(batch.source, batch.lengths, batch.target_in)
            readouts, shares, tokens = decoded.prediction.components()
            rows, table, bias = map(in_autocast_dtype, teacher.output.layer().operands(readouts))
            layers.append((table, bias))
            inputs += Components(rows, shares, tokens)
        return partial(self.criterion, output_layers=layers), tuple(inputs)


def repeat(batch: Batch, passes: int) -> Batch:
    """Repeat a batch, pass after pass, so that all passes are decoded at once."""
    if passes == 1:
        return batch
    alignment = batch.alignment
    return batch._replace(
        source=batch.source.repeat(passes, 1),
        lengths=batch.lengths.repeat(passes),
        target_in=batch.target_in.repeat(passes, 1),
        target_out=batch.target_out.repeat(passes, 1),
        alignment=None if alignment is None else alignment.repeat(passes, 1, 1),
    )


class Auxiliary:
    """A loss that is added to that of the target tokens."""

    start = 0  # updates without it
    can_be_recorded = True  # see Objective.can_be_recorded

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """Compute sums over the target tokens: () weighted, to minimise, and terms () before weighting."""
        raise NotImplementedError


@dataclass(frozen=True)
class CoverageLoss(Auxiliary):
    """Penalises attending to the same source position again   (See et al. 2017, eq. 12)."""

    weight: float
    pad: int
    start: int

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """See Auxiliary."""
        assert prediction.decoded.weights is not None
        loss = coverage_loss(prediction.decoded.weights, prediction.batch.target_out != self.pad)
        return self.weight * loss, {"coverage_loss": loss}


@dataclass(frozen=True)
class GuidedAlignment(Auxiliary):
    """Pulls the attention towards given word alignments   (Chen et al. 2016, with cross-entropy)."""

    weight: float

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """See Auxiliary."""
        attention, alignment = prediction.decoded.attention, prediction.batch.alignment
        assert attention is not None
        assert attention.log_weights is not None
        assert alignment is not None
        loss = guided_alignment_loss(attention.log_weights, alignment)
        return self.weight * loss, {"alignment_loss": loss}


@dataclass(frozen=True)
class PolicyGradient(Auxiliary):
    """Trains the positions that a hard attention samples: REINFORCE, with the negative loss of the tokens as the
    reward, so that positions and predictions minimise one expected loss. Without label smoothing, the reward is the
    log-likelihood. A learned baseline is trained beside it, with weight 1."""

    weight: float
    policy: Policy
    loss: TokenLoss
    can_be_recorded = False

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """See Auxiliary."""
        assert prediction.decoded.attention is not None
        assert prediction.decoded.attention.choice is not None
        counted = prediction.batch.target_out != self.loss.pad
        result = self.policy(prediction.decoded.attention.choice, -self.loss.minimised(prediction.terms), counted)
        terms = {"policy_loss": result.loss, "policy_entropy": result.entropy}
        return self.weight * result.loss + result.regression, terms


@dataclass(frozen=True)
class Divergence(Auxiliary):
    """KL(q || a_t) between an inference network and the prior, exact for categorical distributions: with the expected
    loss of the tokens it is the negative evidence lower bound   (Deng et al. 2018, 3)."""

    weight: float
    pad: int

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """See Auxiliary."""
        inferred, attention = prediction.decoded.inferred, prediction.decoded.attention
        assert inferred is not None
        assert attention is not None
        assert attention.log_weights is not None
        loss = divergence(inferred.log_probs, attention.log_weights, prediction.batch.target_out != self.pad)
        return self.weight * loss, {"kl_loss": loss}


@dataclass(frozen=True)
class InferenceGradient(Auxiliary):
    """Trains an inference network by positions sampled from it: REINFORCE, with the negative loss of the token as the
    reward and that of soft attention as the baseline   (Deng et al. 2018, eq. 1, without label smoothing).

    The reward is what the prediction minimises, so that the mean over samples is the gradient of the enumerated sum.
    """

    loss: TokenLoss
    smoothing: float
    can_be_recorded = False

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """See Auxiliary."""
        decoded, targets = prediction.decoded, prediction.batch.target_out
        assert decoded.inferred is not None
        assert decoded.inferred.log_prob is not None
        model, pad = self.loss.model, self.loss.pad
        with torch.no_grad():
            criterion = partial(likelihood, smoothing=self.smoothing)
            soft = model.loss(Readouts(decoded.readouts.detach()), targets, pad, criterion).terms["smoothed_loss"]
        advantage = (soft - self.loss.minimised(prediction.terms)).masked_fill(targets == pad, 0.0)
        loss = -(advantage * decoded.inferred.log_prob).sum()
        return loss, {"inference_loss": loss}


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


class Objective:
    """Computes what a configuration minimises, for one batch after another.

    Makes the model's attention return log-weights if guided alignment reads them.
    """

    def __init__(self, model: Seq2Seq, config: TrainConfig, pad: int, teachers: Sequence[Seq2Seq] = ()) -> None:
        """pad: the target padding's id; teachers: those of a distillation."""
        self.seed = config.seed
        self.model, self.loss = model, build_token_loss(model, config, pad, teachers)
        self.auxiliary = build_auxiliary(model, config, self.loss)
        if any(isinstance(auxiliary, GuidedAlignment) for auxiliary in self.auxiliary):
            model.record_log_weights()

    def can_be_recorded(self, step: int) -> bool:
        """May the passes of update number `step` be recorded for later updates? Only if all batches of one shape run
        the same kernels on nothing but their own tensors. Positions sampled for a sentence depend on its number."""
        auxiliary = all(loss.can_be_recorded and step > loss.start for loss in self.auxiliary)
        return self.loss.can_be_recorded and auxiliary

    def __call__(self, batch: Batch, step: int) -> Value:
        """Compute the objective for a batch on the model's device, in update number `step`, from 1."""
        with sentence_draws(SentenceDraws(lambda: sentence_keys((self.seed, step), batch.indices))):
            prediction = self.loss(batch)
        total = prediction.total
        terms = {name: term.sum() for name, term in prediction.terms.items()}
        for auxiliary in self.auxiliary:
            loss, added = auxiliary(prediction)
            if step > auxiliary.start:
                total = total + loss / prediction.passes
            terms |= {name: term / prediction.passes for name, term in added.items()}
        return Value(total, {name: term.detach() for name, term in terms.items()})

    def after_update(self, terms: Mapping[str, Tensor], tokens: int) -> None:
        """Move the baseline of a hard attention, by the terms and target tokens of the whole batch of an update."""
        if self.model.policy is not None:
            self.model.policy.after_update(-self.loss.minimised(dict(terms)) / tokens)


def build_token_loss(model: Seq2Seq, config: TrainConfig, pad: int, teachers: Sequence[Seq2Seq] = ()) -> TokenLoss:
    """Build the loss on target tokens that the configuration chooses."""
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
            losses.append(CoverageLoss(coverage.loss_weight, pad, coverage.loss_start))
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
