"""Distributions that mix what an output layer predicts with tokens copied from the source.

Shapes: C copies of a batch, N target positions, n of them in a chunk, S source positions, V vocabulary.
"""

from torch import Tensor

from nmt.ops.output_loss import Criterion
from nmt.ops.precision import finite_log, wide_dtype


def copied_log_probs(logits: Tensor, shares: Tensor, tokens: Tensor) -> Tensor:
    """log(w_0 softmax(z)_v + sum of w_s over the positions s with token v): (..., V), weights (..., 1 + S) that sum
    to 1, int64 (..., S) -> float32 or wider (..., V)   (See et al. 2017, eq. 9)."""
    dtype = wide_dtype(logits.dtype)
    probs = logits.softmax(-1, dtype=dtype) * shares[..., :1]
    return finite_log(probs.scatter_add_(-1, tokens, shares[..., 1:].to(dtype)))


def with_copies(criterion: Criterion, source: Tensor) -> Criterion:
    """The same criterion of mixed log-probabilities, which are logits that are already normalised. source: int64
    (B, S). The result gets logits (C, n, V), shares (C, n, 1 + S), the positions' sentences (n,), and the rest."""

    def of_mixed(
        logits: Tensor, shares: Tensor, sentences: Tensor, *others: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = source[sentences].expand(len(logits), -1, -1)
        return criterion(copied_log_probs(logits, shares, tokens), *others)

    return of_mixed
