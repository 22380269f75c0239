"""Regularised dropout: two predictions of every sentence, with different dropout, are to agree (Liang et al. 2021).

Shapes: B batch, T target positions, R readout.
"""

from torch import Tensor

from nmt.data.batching import Batch
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.r_drop import RDropLoss, linear_r_drop


def twice(batch: Batch) -> Batch:
    """Every pair a second time, behind all the first: what dropout draws for one is not what it draws for the other
    (but for weight drop, whose mask is the batch's).

    One pass over 2 B pairs costs less than two over B. Target tokens are counted once.
    """
    alignment = batch.alignment
    return batch._replace(
        source=batch.source.repeat(2, 1),
        lengths=batch.lengths.repeat(2),
        target_in=batch.target_in.repeat(2, 1),
        target_out=batch.target_out.repeat(2, 1),
        alignment=None if alignment is None else alignment.repeat(2, 1, 1),
    )


def r_drop_loss(
    model: Seq2Seq, readouts: Tensor, targets: Tensor, pad: int, alpha: float, smoothing: float
) -> RDropLoss:
    """(2 B, T, R), int64 (2 B, T), of a batch that is there `twice` -> sums over all target tokens of the batch."""
    two = readouts.view(2, -1, readouts.shape[-1])
    once = targets[: len(targets) // 2].flatten()
    return linear_r_drop(*model.output.operands(two), once, alpha, smoothing, pad)
