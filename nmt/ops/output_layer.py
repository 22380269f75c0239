"""What losses of the output layer share: logits in chunks that become their own gradient in place.

Shapes: C copies of a batch, N target positions, n of them, R readout, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.ops.matmul import input_gradient, matmul, weight_gradient
from nmt.ops.shared import in_autocast_dtype

CHUNK_NUMBERS = 2**24  # of logits held at a time: 64 MiB in float32
CACHED_NUMBERS = 2**20  # of probabilities made of them at a time on a CPU: 4 MiB, which stay in its cache

Criterion = Callable[[Tensor, slice], Tensor | None]
"""Logits (C, n, V) and which positions n of N they are of -> their gradient (C, n, V), float32 or wider, or None."""


class Gradients(NamedTuple):
    readouts: Tensor  # (C, N, R)
    weight: Tensor  # (V, R)
    bias: Tensor  # (V,)


def through_logits(
    readouts: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, criterion: Criterion
) -> Gradients | None:
    """(C, N, R), (V, R), (V,), factors (N,) of the positions' gradients -> gradients, if the criterion makes them.

    Memory holds one chunk of logits, and of what the criterion makes of them what fits a cache (on a GPU as many).
    """
    (C, N, R), V = readouts.shape, len(weight)
    readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
    cached = CACHED_NUMBERS if weight.device.type == "cpu" else CHUNK_NUMBERS
    grads: tuple[list[Tensor], ...] = [], [], []  # by chunk: of readouts; the sum: of weight, bias
    for rows in _chunks(N, C * V, CHUNK_NUMBERS):
        inputs, factors = readouts[:, rows].reshape(-1, R), scale[rows]
        logits = matmul(inputs, weight, bias).view(C, -1, V)
        of_bias, found = torch.zeros(V, dtype=scale.dtype, device=weight.device), None
        for few in _chunks(len(factors), C * V, cached):
            found = criterion(logits[:, few], slice(rows.start + few.start, rows.start + few.stop))
            if found is not None:
                of_bias.addmv_(found.flatten(0, 1).t(), factors[few].repeat(C))
                logits[:, few] = found
        if found is not None:
            by_row, flat = factors.to(logits.dtype).repeat(C)[:, None], logits.flatten(0, 1)
            grads[0].append((input_gradient(flat, weight) * by_row).view(C, -1, R))
            _add(grads[1], weight_gradient(inputs * by_row, flat).to(scale.dtype))
            _add(grads[2], of_bias)
    return Gradients(torch.cat(grads[0], dim=1), grads[1][0], grads[2][0]) if grads[0] else None


def probabilities(logits: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V), (..., 1) -> p (..., V), the targets' logits (..., 1), the logarithm of the sum of exp (..., 1)."""
    probs = logits.softmax(-1, dtype=wide)
    # By way of the most probable token, whose probability is at least 1 / V: the sum's logarithm loses nothing.
    log_sum = logits.amax(-1, keepdim=True).to(wide) - probs.amax(-1, keepdim=True).log_()
    return probs, logits.gather(-1, targets).to(wide), log_sum


@torch.no_grad()
def most_probable(readouts: Tensor, weight: Tensor, bias: Tensor, banned: Tensor) -> Tensor:
    """(N, R), (V, R), (V,), int64 ids -> int64 (N,): of the ids that are not banned, those of the greatest logits."""
    found = torch.empty(len(readouts), dtype=torch.int64, device=readouts.device)

    def criterion(logits: Tensor, few: slice) -> None:
        found[few] = logits[0].index_fill_(1, banned, -torch.inf).argmax(-1)

    through_logits(readouts[None], weight, bias, readouts.new_empty(len(readouts)), criterion)
    return found


def _chunks(rows: int, columns: int, numbers: int) -> Iterator[slice]:
    """The rows of a (rows, columns) matrix in chunks of so many numbers, at least one row each."""
    size = max(1, numbers // columns)
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def _add(total: list[Tensor], part: Tensor) -> None:
    """The first of them is the sum, so that a single one is neither copied nor added."""
    if total:
        total[0] += part
    else:
        total.append(part)
