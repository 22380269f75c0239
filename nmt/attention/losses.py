"""Losses on attention weights.

Shapes: B batch, S source positions, T target positions.
"""

import torch
from torch import Tensor


def coverage_loss(weights: Tensor, real: Tensor) -> Tensor:
    """sum_t sum_s min(w_ts, c_ts), c_ts the sum of the weights before t   (See et al. 2017, eq. 12).

    (B, T, S), bool (B, T) which target tokens are no padding -> (), summed over these.
    """
    covered = weights.cumsum(1) - weights
    return (torch.minimum(weights, covered).sum(-1) * real).sum()


def guided_alignment_loss(log_weights: Tensor, given: Tensor) -> Tensor:
    """-sum_t sum_s a_ts log w_ts   (Chen et al. 2016, with cross-entropy).

    (B, T, S), given alignment (B, T, S) of which a row sums to 1, or to 0 where nothing is given -> (). Takes the
    log-weights, as the gradient of log w is 1 / w: an underflowed weight would make it NaN.
    """
    # Outside a window the weight is exactly 0: no gradient can raise it, so nothing is counted there.
    return -(given * log_weights.masked_fill(log_weights == -torch.inf, 0.0)).sum()
