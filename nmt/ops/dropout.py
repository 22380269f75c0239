"""Dropout whose mask costs little on a CPU: torch draws one number for each element there, ten times as slowly."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BITS = 16  # of randomness an element: probabilities are met to within 2^-17


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return dropout(inputs, self.p, self.training)


def dropout(inputs: Tensor, p: float, training: bool) -> Tensor:
    """Zeros with probability p, the rest divided by 1 - p; torch's own generator decides."""
    if not training or p == 0:
        return inputs
    if p == 1 or inputs.device.type != "cpu":
        return F.dropout(inputs, p)
    kept = _random_bits(inputs) >= round(p * 2**_BITS) - 2 ** (_BITS - 1)
    dropped: Tensor = inputs * kept.to(inputs.dtype).mul_(1 / (1 - p))
    return dropped


def _random_bits(like: Tensor) -> Tensor:
    """int16, all values equally likely: a quarter of a 64-bit number for each element."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[: like.numel()].view(like.shape)
