"""Losses on the predicted target tokens.

Each criterion is a plain, differentiable function of logits, in nats:

    logits (C, n, V) of C passes over a batch, int64 targets (n,)  ->  loss to minimise (n,), terms to report (n,)

The term "loss" is the negative log-likelihood of the target. Shapes: B batch, T target positions, R readout, V
vocabulary, n target positions of a batch in a chunk.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nmt.data.batching import Batch
from nmt.model.decoder import Decoded
from nmt.model.prediction import Components
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import copied_draws
from nmt.ops.output_loss import Criterion, cross_entropy
from nmt.ops.precision import in_autocast_dtype

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
    """The fields of several models' Components in turn, and ((V, R), (V,)) of each -> (n, V)."""
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
    """A criterion, for each target token given the source and the reference's previous tokens."""

    def __init__(self, model: Seq2Seq, pad: int, criterion: Criterion, passes: int = 1) -> None:
        """passes: over the batch, computed as one; each has its own dropout masks."""
        self.model, self.pad, self.criterion, self.passes = model, pad, criterion, passes

    can_be_recorded = True
    """May its passes be recorded? See Objective.can_be_recorded."""

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
        """The criterion for this batch and what else it reads, (B * T, ...) each."""
        return self.criterion, ()

    def minimised(self, terms: Terms) -> Tensor:
        """The terms (B, T) of a prediction -> what the criterion minimises (B, T): the term "smoothed_loss", if it
        reports one, else "loss"."""
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
        """`distillation` with the teachers' output layers, and the components of their predictions."""
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
    """The batch several times, one after the other. Decoding all of them at once is cheaper."""
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
