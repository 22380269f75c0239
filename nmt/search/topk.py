"""The k best of very many log-probabilities, in a defined order.

torch.topk promises no order among equal values, and on some devices it depends on the shape, so that batch
mates could change a translation. Equal scores are common: logits in bfloat16 have 8 significant bits.
"""

import torch
from torch import Tensor

BLOCK = 64
_POSITION_BITS = 32


def pack_top(log_probs: Tensor, k: int) -> Tensor:
    """(A, M) float32, none positive -> (A, k) int64: the k best, best first; of equals, the lower position first.

    M must be a multiple of BLOCK. One integer holds both a value and its position; see `unpack`.
    """
    rows, columns = log_probs.shape
    blocks = log_probs.view(rows, columns // BLOCK, BLOCK)
    # The k best stand in the k blocks with the best maxima: each block ranked before an element's own block
    # holds an element ranked before it. So one cheap pass leaves k * BLOCK of the M columns to rank.
    first = torch.arange(0, columns, BLOCK, device=log_probs.device)
    starts = _best(blocks.amax(-1), first, min(k, len(first)))[1]
    within = torch.arange(BLOCK, device=log_probs.device)
    positions = (starts[:, :, None] + within).flatten(1)
    return _pack(log_probs.gather(1, positions), positions).topk(k, largest=False).values


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """int64 of any shape -> the log-probabilities (float32) and their positions (int64)."""
    values = -(packed >> _POSITION_BITS).int().view(torch.float32)
    return values, packed & ((1 << _POSITION_BITS) - 1)


def _pack(log_probs: Tensor, positions: Tensor) -> Tensor:
    # The bits of floats that are not negative, read as an integer, keep their order: least is best.
    return (log_probs.abs().view(torch.int32).long() << _POSITION_BITS) + positions


def _best(log_probs: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return unpack(_pack(log_probs, positions).topk(k, largest=False, sorted=False).values)
