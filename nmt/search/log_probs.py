"""Log-probabilities of the next tokens, and the k best of them."""

import math

import torch
from torch import Tensor

from nmt.search.hypothesis import Symbols


class LogProbs:
    """Normalises and masks, step after step, in one buffer: it never writes to the model's own logits.

    What it returns therefore holds until the next call, and may be overwritten until then.
    """

    def __init__(self, symbols: Symbols, min_length: int, device: torch.device) -> None:
        assert symbols.eos not in symbols.banned
        self._eos = symbols.eos
        self._min_length = min_length
        self._banned = torch.tensor(symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self._buffer = torch.empty(0, 0, device=device)

    def __call__(self, logits: Tensor, length: int, at_max: list[bool]) -> Tensor:
        """(N, V) -> (N, V') float32, -inf for what may not come; V' is V padded with -inf to whole blocks.

        `length` counts the token to be chosen; rows that are `at_max` may only end. Masking does not
        renormalise: the values are the model's own.
        """
        rows, vocabulary = logits.shape
        if len(self._buffer) < rows:
            columns = -(-vocabulary // BLOCK) * BLOCK
            self._buffer = torch.full((rows, columns), -math.inf, device=logits.device)
        log_probs = self._buffer[:rows]
        torch.log_softmax(logits, -1, dtype=torch.float32, out=log_probs[:, :vocabulary])
        self._mask(log_probs, length, at_max)
        return log_probs

    def _mask(self, log_probs: Tensor, length: int, at_max: list[bool]) -> None:
        end = log_probs[:, self._eos]
        forced_end = end.clone()
        log_probs.index_fill_(1, self._banned, -math.inf)
        if length <= self._min_length:
            end.fill_(-math.inf)
        if any(at_max):
            forced = torch.tensor(at_max).to(log_probs.device, non_blocking=True)
            log_probs.masked_fill_(forced[:, None], -math.inf)
            end.copy_(torch.where(forced, forced_end, end))


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
