"""Computes the objective of training: the losses of all target tokens, plus auxiliary losses for the attention.

A criterion is a plain, differentiable function that computes the loss of each token from logits, in nats:

    logits (C, n, V) of C passes over a batch, int64 targets (n,)  ->  loss of each token (n,), loss terms (n,) by name

Four words keep the losses apart:
- The loss of each token is what training minimises for this target token.
- A reduced loss is a sum over the target tokens of a batch.
- The objective is the sum of the reduced losses: that of the criterion, and those of the auxiliary losses.
- Loss terms are only reported. The term "loss" is the negative log-likelihood of the target token.

Shapes: B batch, S source positions, T target positions, R readout, V vocabulary, n target positions in a chunk of a
batch.
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
from nmt.model.output import Components, Readouts
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import SentenceDraws, copied_draws, sentence_draws, sentence_keys
from nmt.ops.output_loss import Criterion, cross_entropy
from nmt.ops.products import in_autocast_dtype
from nmt.ops.trees import map_tensors

Terms = dict[str, Tensor]


def likelihood(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Terms]:
    """Compute the label-smoothed cross-entropy of logits (1, n, V), for n target positions and a vocabulary of V tokens
    (Szegedy et al. 2016, section 7)."""
    smoothed, nll = cross_entropy(logits[0], targets, smoothing)
    return smoothed, {"loss": nll, "smoothed_loss": smoothed}


def r_drop(logits: Tensor, targets: Tensor, alpha: float, smoothing: float) -> tuple[Tensor, Terms]:
    """Compute half of the R-Drop loss of each token (Liang et al. 2021, eq. 4) from logits (2, n, V) of two passes.

    The passes have different dropout masks, and predict the distributions p_1 and p_2. Half of the loss is
    1/2 (CE_1 + CE_2) + alpha/2 * 1/2 (KL(p_1 || p_2) + KL(p_2 || p_1)), with label-smoothed cross-entropies CE.
    """
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
    """Compute (1 - w) CE + w KL(q || p) of a student p with logits (1, n, V)   (Kim and Rush 2016, 3.1).

    w is `teacher_weight`, CE is the label-smoothed cross-entropy, and q is the mean of the teachers' distributions. The
    paper leaves out the entropy of q, a constant term of KL. components, output_layers: see `mean_probabilities`.
    """
    log_probs = logits[0].log_softmax(-1)
    smoothed, nll = smoothed_nll(log_probs, targets, smoothing)
    q = mean_probabilities(components, output_layers, log_probs.dtype)
    # The KL divergence is one sum: the difference of a cross-entropy and an entropy would lose digits by cancellation.
    divergence = functional.kl_div(log_probs, q, reduction="none").sum(-1)
    loss = (1 - teacher_weight) * smoothed + teacher_weight * divergence
    return loss, {"loss": nll, "smoothed_loss": smoothed, "distillation_loss": divergence}


def smoothed_nll(log_probs: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute label-smoothed cross-entropy and negative log-likelihood: (..., V), int64 (...) -> (...), (...)."""
    nll = -log_probs.gather(-1, targets[..., None])[..., 0]
    return (1 - smoothing) * nll - smoothing * log_probs.mean(-1), nll


@torch.no_grad()
def mean_probabilities(
    components: Sequence[Tensor], output_layers: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> Tensor:
    """Average the distributions that several models predict at n target positions -> (n, V).

    components: the tensors of nmt.model.output.Components, model after model. output_layers: the weight (V, R) and
    the bias (V,) of each model's output layer, where R is the size of a readout.
    """
    fields = len(Components._fields)
    models = (Components(*components[i : i + fields]) for i in range(0, len(components), fields))
    layers = zip(models, output_layers, strict=True)
    total, *others = (model.probabilities(*layer, dtype) for model, layer in layers)
    for other in others:
        total += other
    return total.div_(len(output_layers))


class TokenPrediction(NamedTuple):
    """What the model decoded for a batch, in one or more passes, and the losses of its target tokens."""

    batch: Batch  # passes * B sentences: the batch, repeated for each pass
    decoded: Decoded  # of the same sentences
    total: Tensor  # () reduced loss: the sum of the losses of all target tokens
    terms: Terms  # loss terms by name, each (B, T), 0 at padding and detached
    passes: int = 1  # how often each sentence was decoded: once, except with R-Drop


class TokenLoss:
    """Decodes a batch by teacher forcing, and computes the loss of each target token by a criterion such as
    `likelihood`."""

    can_be_recorded = True  # see Objective.can_be_recorded

    def __init__(self, model: Seq2Seq, pad: int, criterion: Criterion, passes: int = 1) -> None:
        """passes: how often each sentence is decoded, with different dropout masks: twice for R-Drop, else once."""
        self.model, self.pad, self.criterion, self.passes = model, pad, criterion, passes

    def __call__(self, batch: Batch) -> TokenPrediction:
        """Decode a batch on the model's device in all passes at once, and compute the loss of each target token. By
        default there is a single pass, which decodes each sentence once."""
        targets, B = batch.target_out, len(batch.source)
        if self.passes > 1:
            batch = repeat(batch, self.passes)
        numbers = torch.arange(len(batch.source))
        with copied_draws(numbers % B, numbers // B):  # number n is sentence n % B in pass n // B
            decoded: Decoded = self.model(batch.source, batch.lengths, batch.target_in, batch.target_out)
        return self.of_decoded(batch, decoded, targets)

    def of_decoded(self, batch: Batch, decoded: Decoded, targets: Tensor) -> TokenPrediction:
        """Compute the loss of each target token from what all passes decoded. batch: the batch repeated for each pass;
        targets: (B, T), not repeated."""
        criterion, inputs = self.with_inputs(batch)
        total, terms = decoded.prediction.loss(self.model.output.layer(), targets, self.pad, criterion, *inputs)
        return TokenPrediction(batch, decoded, total, terms, self.passes)

    def with_inputs(self, batch: Batch) -> tuple[Criterion, tuple[Tensor, ...]]:
        """Return the criterion for this batch, and the criterion's inputs (B * T, ...) besides logits and targets.
        This class has no such inputs."""
        return self.criterion, ()

    def minimised(self, terms: Terms) -> Tensor:
        """Combine loss terms into the loss that training minimises: "smoothed_loss" if there is one, else "loss".

        From terms (B, T) of tokens follows the loss (B, T) of each token; from terms () that are sums over a batch, the
        reduced loss (). Only losses that exclude R-Drop call this, so its divergence is left out.
        """
        return terms.get("smoothed_loss", terms["loss"])


class Distillation(TokenLoss):
    """Mixes the cross-entropy of each token with the divergence from teachers. The teachers decode the same batch as
    the model, but without dropout."""

    can_be_recorded = False

    def __init__(
        self, model: Seq2Seq, pad: int, teachers: Sequence[Seq2Seq], teacher_weight: float, smoothing: float
    ) -> None:
        super().__init__(model, pad, partial(distillation, teacher_weight=teacher_weight, smoothing=smoothing))
        self.teachers, self.teacher_weight = teachers, teacher_weight

    def minimised(self, terms: Terms) -> Tensor:
        """Compute (1 - w) smoothed_loss + w distillation_loss, where w is `teacher_weight`. Shapes as in
        `TokenLoss.minimised`."""
        weight = self.teacher_weight
        return (1 - weight) * terms["smoothed_loss"] + weight * terms["distillation_loss"]

    @torch.no_grad()
    def with_inputs(self, batch: Batch) -> tuple[Criterion, tuple[Tensor, ...]]:
        """Decode the batch with each teacher. Returns `distillation` with the teachers' output layers filled in, and
        the components of the teachers' predictions."""
        layers: list[tuple[Tensor, Tensor]] = []
        inputs: list[Tensor] = []
        for teacher in self.teachers:
            decoded: Decoded = teacher(batch.source, batch.lengths, batch.target_in)
            components = decoded.prediction.components()
            readouts, weight, bias = map(in_autocast_dtype, teacher.output.layer().operands(components.readouts))
            layers.append((weight, bias))
            inputs += components._replace(readouts=readouts)
        return partial(self.criterion, output_layers=layers), tuple(inputs)


def repeat(batch: Batch, passes: int) -> Batch:
    """Repeat the sentences of a batch, pass after pass, to decode all passes at once: (B, ...) -> (passes * B, ...)."""
    return map_tensors(lambda tensor: tensor.repeat(passes, *[1] * (tensor.dim() - 1)), batch)


class Auxiliary:
    """An auxiliary loss. Its sum over the batch is added to the reduced loss of the criterion."""

    delay = 0  # number of initial updates in which this loss is only reported, not minimised
    can_be_recorded = True  # see Objective.can_be_recorded

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        """Compute sums over the target tokens of all passes: the reduced loss (), multiplied by its weight, and loss
        terms () before weighting."""
        raise NotImplementedError


@dataclass(frozen=True)
class CoverageLoss(Auxiliary):
    """Penalises attention to a source position that had weight at earlier steps   (See et al. 2017, eq. 12)."""

    weight: float
    pad: int
    delay: int

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        assert prediction.decoded.weights is not None
        loss = coverage_loss(prediction.decoded.weights, prediction.batch.target_out != self.pad)
        return self.weight * loss, {"coverage_loss": loss}


@dataclass(frozen=True)
class GuidedAlignment(Auxiliary):
    """Trains the attention weights by cross-entropy with given word alignments   (Chen et al. 2016)."""

    weight: float

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        attention, alignment = prediction.decoded.attention, prediction.batch.alignment
        assert attention is not None
        assert attention.log_weights is not None
        assert alignment is not None
        loss = guided_alignment_loss(attention.log_weights, alignment)
        return self.weight * loss, {"alignment_loss": loss}


@dataclass(frozen=True)
class PolicyGradient(Auxiliary):
    """Trains the distribution from which a hard attention samples positions, by REINFORCE.

    The reward of a token is its negative loss, so that attention and predictions minimise the same expected loss.
    Without label smoothing, the reward is the log-likelihood. A learned baseline is trained by its regression loss,
    whose weight is always 1.
    """

    weight: float
    policy: Policy
    token_loss: TokenLoss
    can_be_recorded = False

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        assert prediction.decoded.attention is not None
        assert prediction.decoded.attention.choice is not None
        counted = prediction.batch.target_out != self.token_loss.pad
        rewards = -self.token_loss.minimised(prediction.terms)
        result = self.policy(prediction.decoded.attention.choice, rewards, counted)
        terms = {"policy_loss": result.loss, "policy_entropy": result.entropy}
        return self.weight * result.loss + result.regression, terms


@dataclass(frozen=True)
class Divergence(Auxiliary):
    """Penalises KL(q_t || a_t) between q_t, an inference network's distribution over positions, and the prior a_t, the
    attention weights.

    The divergence is computed exactly, because both distributions are categorical. The sum of the divergence and the
    expected negative log-likelihood is the negative evidence lower bound   (Deng et al. 2018, section 3).
    """

    weight: float
    pad: int

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        inferred, attention = prediction.decoded.inferred, prediction.decoded.attention
        assert inferred is not None
        assert attention is not None
        assert attention.log_weights is not None
        loss = divergence(inferred.log_probs, attention.log_weights, prediction.batch.target_out != self.pad)
        return self.weight * loss, {"kl_loss": loss}


@dataclass(frozen=True)
class InferenceGradient(Auxiliary):
    """Trains an inference network by REINFORCE, with positions sampled from the network   (Deng et al. 2018, eq. 1;
    the paper has no label smoothing).

    The reward of a token is its negative loss, and the baseline is the negative loss with soft attention. As the
    predictions minimise the same loss, the mean gradient over many samples is that of the exact expectation, which
    sums over all positions.
    """

    token_loss: TokenLoss
    can_be_recorded = False

    def __call__(self, prediction: TokenPrediction) -> tuple[Tensor, Terms]:
        decoded, targets = prediction.decoded, prediction.batch.target_out
        assert decoded.inferred is not None
        assert decoded.inferred.log_prob is not None
        model, pad = self.token_loss.model, self.token_loss.pad
        with torch.no_grad():
            criterion, inputs = self.token_loss.with_inputs(prediction.batch)
            readouts = Readouts(decoded.readouts.detach())
            soft = readouts.loss(model.output.layer(), targets, pad, criterion, *inputs).terms
        minimised = self.token_loss.minimised
        advantage = (minimised(soft) - minimised(prediction.terms)).masked_fill(targets == pad, 0.0)
        loss = -(advantage * decoded.inferred.log_prob).sum()
        return loss, {"inference_loss": loss}


def divergence(log_q: Tensor, log_p: Tensor, counted: Tensor) -> Tensor:
    """Compute sum_t sum_s q_ts (log q_ts - log p_ts): log q (B, T, S), log p (B, T, S), bool (B, T) -> ().

    Target positions t at which `counted` is False are left out. q must be 0 wherever p is 0.
    """
    inside = log_q != -torch.inf
    difference = torch.where(inside, log_q, 0.0) - torch.where(inside, log_p, 0.0)
    return ((log_q.exp() * difference).sum(-1) * counted).sum()


def coverage_loss(weights: Tensor, counted: Tensor) -> Tensor:
    """Compute sum_t sum_s min(w_ts, c_ts): w (B, T, S), bool (B, T) -> (). c_ts is the sum of the weights w_us of
    position s at all steps u < t. Target positions t at which `counted` is False are left out."""
    covered = weights.cumsum(1) - weights
    return (torch.minimum(weights, covered).sum(-1) * counted).sum()


def guided_alignment_loss(log_weights: Tensor, alignment: Tensor) -> Tensor:
    """Compute -sum_t sum_s a_ts log w_ts: log w (B, T, S), a (B, T, S) -> ().

    The row a_t of the alignment sums to 1, or to 0 if target token t is not aligned. The function takes log-weights,
    because for a weight w that underflows, the gradient of log w would be NaN.
    """
    # Positions outside an attention window do not count: their weights are exactly 0, and no gradient can raise them.
    return -(alignment * log_weights.masked_fill(log_weights == -torch.inf, 0.0)).sum()


class Value(NamedTuple):
    """The objective of a batch and the loss terms: sums over target tokens, in nats."""

    total: Tensor  # () the objective, which an update minimises
    # loss terms by name, each () before weighting: those of the criterion, then those of the auxiliary losses
    terms: dict[str, Tensor]


class Objective:
    """Computes the configured objective of one batch after another. If a loss reads the logarithms of the attention
    weights, the objective makes the model's attention return them."""

    def __init__(self, model: Seq2Seq, config: TrainConfig, pad: int, teachers: Sequence[Seq2Seq] = ()) -> None:
        """pad: id of target padding; teachers: the models to distil from; empty without distillation."""
        self.seed = config.seed
        self.model, self.token_loss = model, build_token_loss(model, config, pad, teachers)
        self.auxiliary = build_auxiliary(model, config, self.token_loss)
        if any(isinstance(auxiliary, GuidedAlignment | Divergence) for auxiliary in self.auxiliary):
            model.return_log_weights()

    def can_be_recorded(self, step: int) -> bool:
        """Check if update number `step` may record its forward and backward pass as a CUDA graph for later updates.

        A recording needs all batches of one shape to run the same kernels and to read only their own tensors. Losses
        with sampled positions prevent recording: their samples also depend on the sentences' indices in the corpus.
        """
        auxiliary = all(loss.can_be_recorded and step > loss.delay for loss in self.auxiliary)
        return self.token_loss.can_be_recorded and auxiliary

    def __call__(self, batch: Batch, step: int) -> Value:
        """Compute the objective of a batch on the model's device, in update number `step` (the first update is 1)."""
        with sentence_draws(SentenceDraws(lambda: sentence_keys((self.seed, step), batch.indices))):
            prediction = self.token_loss(batch)
        total = prediction.total
        terms = {name: term.sum() for name, term in prediction.terms.items()}
        for auxiliary in self.auxiliary:
            loss, added = auxiliary(prediction)  # sums over all passes
            if step > auxiliary.delay:
                total = total + loss / prediction.passes
            terms |= {name: term / prediction.passes for name, term in added.items()}
        return Value(total, {name: term.detach() for name, term in terms.items()})

    def after_update(self, terms: Mapping[str, Tensor], tokens: int) -> None:
        """Update the moving baseline of a hard attention, if there is one, with the mean reward of a token. terms: loss
        terms (), summed over the whole batch of the update; tokens: the batch's number of target tokens."""
        if self.model.policy is not None:
            self.model.policy.after_update(-self.token_loss.minimised(dict(terms)) / tokens)


def build_token_loss(model: Seq2Seq, config: TrainConfig, pad: int, teachers: Sequence[Seq2Seq] = ()) -> TokenLoss:
    """Build the `TokenLoss` with the criterion that the configuration chooses."""
    objective, smoothing = config.objective, config.training.label_smoothing
    if isinstance(objective, schema.Distillation):
        return Distillation(model, pad, teachers, objective.teacher_weight, smoothing)
    if config.training.r_drop:
        return TokenLoss(model, pad, partial(r_drop, alpha=config.training.r_drop, smoothing=smoothing), passes=2)
    return TokenLoss(model, pad, partial(likelihood, smoothing=smoothing))


def build_auxiliary(model: Seq2Seq, config: TrainConfig, token_loss: TokenLoss) -> list[Auxiliary]:
    """Build the auxiliary losses that the configuration chooses."""
    losses, pad = list[Auxiliary](), token_loss.pad
    if isinstance(config.attention, ScoredAttention):
        coverage, alignment = config.attention.coverage, config.attention.alignment
        if isinstance(coverage, LinearCoverage) and coverage.loss_weight:
            losses.append(CoverageLoss(coverage.loss_weight, pad, coverage.loss_start))
        if isinstance(alignment, Sampled):
            assert model.policy is not None
            losses.append(PolicyGradient(alignment.weight, model.policy, token_loss))
        if isinstance(alignment, Variational):
            losses.append(Divergence(alignment.kl_weight, pad))
            if alignment.estimator == "sample":
                losses.append(InferenceGradient(token_loss))
    if config.training.guided_alignment:
        losses.append(GuidedAlignment(config.training.guided_alignment))
    return losses
