"""Averages over the readouts of a target position.

Shapes: C copies of a batch, n target positions, K readouts of a position, m readouts in all, V vocabulary. Readouts of
the same position and copy follow each other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.output_loss import Criterion
from nmt.ops.precision import finite_log, wide, wide_dtype


class Mixing(NamedTuple):
    """The weights of readouts."""

    shares: Tensor  # (m,)
    owners: Tensor  # int64 (m,) copy * n + position
    size: int  # C * n
    copies_and_readouts: tuple[int, int] | None  # C, K if all readouts are present, in the order (n, C, K)

    def sum(self, values: Tensor) -> Tensor:
        """sum_k w_k v_k: (m, d) of the readouts -> (C * n, d), in their precision also under autocast."""
        with torch.autocast(values.device.type, enabled=False):
            if self.copies_and_readouts is None:
                matrix = self.shares.new_zeros(self.size, len(self.shares))
                return matrix.index_put((self.owners, torch.arange(len(self.shares))), self.shares) @ values
            C, K = self.copies_and_readouts
            sums = torch.bmm(self.shares.view(-1, 1, K), values.view(-1, K, values.shape[1]))
            return sums.view(-1, C, values.shape[1]).transpose(0, 1).flatten(0, 1)

    def groups(self, values: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """(m, d), (C * n, d) -> (n * C, K, d), (n * C, 1, d) if all readouts are present, else (m, 1, d) both: values,
        and the sum to which they belong."""
        d = values.shape[1]
        if self.copies_and_readouts is None:
            return values[:, None], sums[self.owners, None]
        C, K = self.copies_and_readouts
        return values.view(-1, K, d), sums.view(C, -1, d).transpose(0, 1).reshape(-1, 1, d)


CombineReadouts = Callable[[Criterion, Tensor, Mixing, tuple[Tensor, ...]], tuple[Tensor, dict[str, Tensor]]]
"""A criterion, the logits (m, V) of a chunk's readouts, their weights, and what else the criterion reads, (n, ...) each
-> loss to minimise (n,), terms to report (n,)."""


def criterion_of_mean(
    criterion: Criterion, logits: Tensor, mixing: Mixing, by_position: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The criterion of log sum_k w_k p_k: a mixture's log-probabilities are logits that are already normalised."""
    probs: Tensor = _MeanOfSoftmax.apply(logits, mixing.shares, mixing)  # type: ignore[no-untyped-call]
    return criterion(finite_log(probs).view(-1, len(by_position[0]), logits.shape[-1]), *by_position)


def mean_of_criteria(
    criterion: Criterion, logits: Tensor, mixing: Mixing, by_position: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_k w_k criterion(logits_k), for one copy."""
    loss, terms = criterion(wide(logits)[None], *(tensor[mixing.owners] for tensor in by_position))
    mean, *means = mixing.sum(torch.stack([loss, *terms.values()], dim=1)).unbind(1)
    return mean, dict(zip(terms, means, strict=True))


class _MeanOfSoftmax(torch.autograd.Function):
    """sum_k w_k softmax(l_k): (m, V), (m,) the weights of a Mixing -> float32 or wider (C * n, V).

    Beside the logits and their gradient, it holds two tensors (m, V); autograd would hold four.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shares: Tensor, mixing: Mixing) -> Tensor:  # noqa: ANN401
        probs = logits.softmax(-1, dtype=wide_dtype(logits.dtype))
        ctx.save_for_backward(probs, shares)
        ctx.mixing, ctx.dtype = mixing, logits.dtype
        return mixing.sum(probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        probs, shares = ctx.saved_tensors
        with torch.autocast(probs.device.type, enabled=False):
            grouped, slopes = ctx.mixing.groups(probs, grad)
            shares_grad = grouped @ slopes.transpose(1, 2)
            logits_grad = (slopes - shares_grad).mul_(grouped).mul_(shares.view(shares_grad.shape))
        return logits_grad.view(probs.shape).to(ctx.dtype), shares_grad.view(-1), None
