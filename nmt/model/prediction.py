"""From what a decoder hands to the output layer to losses, logits and tokens: readouts, mixtures of them, or readouts
with copies.

Shapes: C copies of a batch, B batch, T target positions, K readouts of a position, R readout, V vocabulary.
"""

import torch
from torch import Tensor

from nmt.model.copying import Copying
from nmt.model.latent.mixture import Mixture
from nmt.model.readout import Output
from nmt.ops import output_loss as ops
from nmt.ops.copying import with_copies
from nmt.ops.linear import linear
from nmt.ops.mixing import criterion_of_mean, mean_of_criteria
from nmt.ops.mixture import mixture_log_probs, mixture_loss
from nmt.ops.output_loss import Criterion, OutputLoss

Predictions = Tensor | Mixture | Copying


def prediction_loss(
    output: Output, readouts: Predictions, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
) -> OutputLoss:
    """See Seq2Seq.loss."""
    counted, others = (targets != pad).flatten(), (targets.flatten(), *by_position)
    if isinstance(readouts, Mixture):
        copies, K = len(readouts.weights) // len(targets), readouts.weights.shape[2]
        operands = output.operands(readouts.readouts.reshape(copies, targets.numel(), K, -1))
        combine = mean_of_criteria if readouts.averages_losses else criterion_of_mean
        mixing = readouts.weights.reshape(copies, -1, K)
        total, terms = mixture_loss(*operands, mixing, counted, combine, criterion, *others)
    elif isinstance(readouts, Copying):
        B, T = targets.shape
        rows, shares = (part.reshape(-1, B * T, part.shape[-1]) for part in (readouts.readouts, readouts.shares))
        sentences = torch.arange(B, device=targets.device).repeat_interleave(T)
        criterion = with_copies(criterion, readouts.source[:B])  # the same of all copies of the batch
        total, terms = ops.output_loss(*output.operands(rows), counted, criterion, sentences, *others, shares=shares)
    else:
        copies = len(readouts) // len(targets)
        operands = output.operands(readouts.reshape(copies, targets.numel(), -1))
        total, terms = ops.output_loss(*operands, counted, criterion, *others)
    return OutputLoss(total, {name: term.view(targets.shape) for name, term in terms.items()})


def prediction_logits(output: Output, readouts: Predictions, table: Tensor | None = None) -> Tensor:
    """(..., R), or a mixture (B, T, K, R) -> (..., V), of a mixture or with copies the log-probabilities (B, T, V).
    `table`: see Output.operands."""
    if isinstance(readouts, Copying):
        return readouts.log_probs(linear(*output.operands(readouts.readouts, table)))
    if not isinstance(readouts, Mixture):
        return linear(*output.operands(readouts, table))
    B, T, _ = readouts.weights.shape
    rows, mixing = readouts.readouts.flatten(0, 1), readouts.weights.flatten(0, 1)
    return mixture_log_probs(*output.operands(rows, table), mixing).view(B, T, -1)


@torch.no_grad()
def most_probable(output: Output, readouts: Predictions, banned: Tensor) -> Tensor:
    """(B, T, R) or a mixture, int64 ids -> int64 (B, T), the most probable tokens that are not banned."""
    if isinstance(readouts, Tensor):
        tokens = ops.most_probable(*output.operands(readouts.flatten(0, 1)), banned)
        return tokens.view(readouts.shape[:2])
    steps = (readouts.between(t, t + 1) for t in range(readouts.readouts.shape[1]))
    logits = (prediction_logits(output, step).index_fill_(-1, banned, -torch.inf) for step in steps)
    return torch.cat([each.argmax(-1) for each in logits], dim=1)
