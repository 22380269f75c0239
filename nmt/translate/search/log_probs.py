"""Masked log-probabilities of the next token, and a deterministic top-k over them."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.translate.search.forbidden import Bans
from nmt.translate.search.hypothesis import Symbols

BLOCK = 64  # columns of a block in `pack_top`
FEW = 2**14  # numbers that are ranked without blocks
_POSITION_BITS = 32
_POSITIONS = 2**_POSITION_BITS - 1
_IMPOSSIBLE = np.int64(np.float32(math.inf).view(np.int32)) << _POSITION_BITS


class LogProbs:
    """Log-softmax and masking in one reused buffer: a result is valid until the next call, and may be overwritten."""

    def __init__(self, symbols: Symbols, min_length: int, device: torch.device) -> None:
        assert symbols.eos not in symbols.banned
        self._eos = symbols.eos
        self._min_length = min_length
        self._banned = torch.tensor(symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self._buffer = torch.empty(0, 0, device=device)

    def __call__(self, logits: Tensor, length: int, forced: list[int | None], bans: Bans | None = None) -> Tensor:
        """(N, V) -> (N, V') float32, -inf for tokens that may not follow; V' is V padded with -inf to whole blocks.

        `length` counts the token to be chosen. forced: the only token that may follow each row, None for any; it counts
        before `bans`, further tokens that may not follow. Masking does not renormalise.
        """
        rows, vocabulary = logits.shape
        if len(self._buffer) < rows:
            columns = -(-vocabulary // BLOCK) * BLOCK
            self._buffer = torch.full((rows, columns), -math.inf, device=logits.device)
        log_probs = self._buffer[:rows]
        torch.log_softmax(logits, -1, dtype=torch.float32, out=log_probs[:, :vocabulary])
        chosen = [(row, token) for row, token in enumerate(forced) if token is not None]
        index = torch.tensor(chosen, dtype=torch.int64).view(-1, 2).to(log_probs.device, non_blocking=True).unbind(1)
        unmasked = log_probs[index] if chosen else None
        log_probs.index_fill_(1, self._banned, -math.inf)
        if length <= self._min_length:
            log_probs[:, self._eos].fill_(-math.inf)
        if bans is not None and bans[0]:
            log_probs[torch.tensor(bans).to(log_probs.device, non_blocking=True).unbind()] = -math.inf
        if unmasked is not None:
            log_probs.index_fill_(0, index[0], -math.inf)
            log_probs[index] = unmasked
        return log_probs


def pack_top(log_probs: Tensor, k: int) -> Tensor:
    """(A, M) float32, none positive -> (A, k) int64: the k best, best first; of equals, the lower position first.

    M must be a multiple of BLOCK. `unpack` separates values and positions. torch.topk leaves the order of equals open,
    and on some devices it depends on the shape, so that other sentences in the batch could change a translation. Equal
    scores are common: logits in bfloat16 have 8 significant bits.
    """
    rows, columns = log_probs.shape
    if rows * columns <= FEW:
        return _pack(log_probs, torch.arange(columns, device=log_probs.device)).topk(k, largest=False).values
    blocks = log_probs.view(rows, columns // BLOCK, BLOCK)
    # The k best elements lie in the k blocks with the greatest maxima: if k blocks rank before an element's own block,
    # k maxima rank before the element. Ranking the maxima leaves k * BLOCK of the M columns to rank.
    first = torch.arange(0, columns, BLOCK, device=log_probs.device)
    top = _pack(blocks.amax(-1), first).topk(min(k, len(first)), largest=False, sorted=False).values
    starts = top & _POSITIONS
    positions = (starts[:, :, None] + torch.arange(BLOCK, device=log_probs.device)).flatten(1)
    return _pack(log_probs.gather(1, positions), positions).topk(k, largest=False).values


def pack_at(log_probs: Tensor, positions: Tensor) -> Tensor:
    """(A, M) float32, none positive, and positions (A, X) -> those, packed like `pack_top`."""
    return _pack(log_probs.gather(1, positions), positions)


def distinct(packed: NDArray[np.int64]) -> NDArray[np.int64]:
    """(A, X) -> the same, best first, with impossible ones in place of repetitions."""
    packed = np.sort(packed, axis=1)
    packed[:, 1:][packed[:, 1:] == packed[:, :-1]] = _IMPOSSIBLE
    return np.sort(packed, axis=1)


def unpack(packed: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """int64 of any shape -> log-probabilities (float32) and positions (int64)."""
    return -(packed >> _POSITION_BITS).astype(np.int32).view(np.float32), packed & _POSITIONS


def _pack(log_probs: Tensor, positions: Tensor) -> Tensor:
    """One integer per value, ordered by value and then position: the least is the best."""
    # The bits of non-negative floats, read as integers, keep their order.
    return (log_probs.abs().view(torch.int32).long() << _POSITION_BITS) + positions
