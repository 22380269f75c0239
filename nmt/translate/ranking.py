"""Ranks log-probabilities, and of equal ones their positions: each pair is packed into one integer.

Shapes: B rows, M numbers of a row, X chosen positions.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

BLOCK = 64  # columns of a block in `pack_top`
FEW = 2**14  # `pack_top` ranks up to this many numbers without blocks
_POSITION_BITS = 32
_POSITIONS = 2**_POSITION_BITS - 1
_IMPOSSIBLE = np.int64(np.float32(math.inf).view(np.int32)) << _POSITION_BITS


def pack_top(log_probs: Tensor, k: int, few: int = FEW) -> Tensor:
    """Find the k best values of each row, best first, packed with their positions: (B, M) float32 -> (B, k) int64. No
    value may be positive, and M must be a multiple of BLOCK. `unpack` separates values and positions.

    Of equal values, which are common in bfloat16, the one at the lower position comes first. torch.topk leaves their
    order open, and on some devices it depends on the shape, so that batch mates could change a translation.
    """
    rows, columns = log_probs.shape
    if rows * columns <= few:
        return _pack(log_probs, torch.arange(columns, device=log_probs.device)).topk(k, largest=False).values
    blocks = log_probs.view(rows, columns // BLOCK, BLOCK)
    # The k best elements lie in the k blocks with the greatest maxima: if k other blocks rank before an element's
    # block, their k maxima rank before the element. So it suffices to rank the k * BLOCK elements of these blocks.
    first = torch.arange(0, columns, BLOCK, device=log_probs.device)
    top = _pack(blocks.amax(-1), first).topk(min(k, len(first)), largest=False, sorted=False).values
    starts = top & _POSITIONS
    positions = (starts[:, :, None] + torch.arange(BLOCK, device=log_probs.device)).flatten(1)
    return _pack(log_probs.gather(1, positions), positions).topk(k, largest=False).values


def pack_at(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Pack log-probabilities with their positions, as `pack_top` does: (B, M), positions (B, X) -> (B, X) int64."""
    return _pack(log_probs.gather(1, positions), positions)


def distinct(packed: Ids) -> Ids:
    """Sort packed numbers (B, X), best first, and replace repetitions by -inf, which comes last."""
    packed = np.sort(packed, axis=1)
    packed[:, 1:][packed[:, 1:] == packed[:, :-1]] = _IMPOSSIBLE
    return np.sort(packed, axis=1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Separate packed numbers of any shape into log-probabilities and positions."""
    return -(packed >> _POSITION_BITS).int().view(torch.float32), packed & _POSITIONS


def _pack(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Combine each value and its position in one integer. A smaller integer means a greater value, or an equal value at
    a lower position."""
    # Non-negative floats have the same order as their bits, read as integers.
    return (log_probs.abs().view(torch.int32).long() << _POSITION_BITS) + positions
