"""Dropout whose mask costs little on a CPU: torch draws one number for each element there, ten times as slowly."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BITS = 16  # of randomness an element: probabilities are met to within 2^-17


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014); variational: a sentence's positions share one mask (Gal and Ghahramani
    2016)."""

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__(p)
        self.variational = variational

    def forward(self, inputs: Tensor) -> Tensor:
        """Any shape -> the same shape; variational: (B, T, D), or (B, D), a vector a sentence."""
        shares = self.variational and inputs.dim() == 3  # noqa: PLR2004
        return dropout(inputs, self.p, self.training, along=1 if shares else None)

    def sentence_mask(self, like: Tensor, *shape: int) -> Tensor | None:
        """(B, D), for callers that come to the positions one by one; None where each of them has a mask of its own."""
        return mask(like, shape, self.p, self.training and self.variational)


def dropout(inputs: Tensor, p: float, training: bool, along: int | None = None) -> Tensor:
    """Zeros with probability p, the rest divided by 1 - p; torch's own generator decides.

    `along`: the dimension all of which stays or goes together, such as the positions of a sentence.
    """
    if not training or p == 0:
        return inputs
    if along is not None:
        return inputs * dropout(torch.ones_like(inputs.select(along, 0)), p, training).unsqueeze(along)
    if p == 1 or inputs.device.type != "cpu":
        return F.dropout(inputs, p)
    kept = _random_bits(inputs) >= _limit(p)
    dropped: Tensor = inputs * kept.to(inputs.dtype).mul_(1 / (1 - p))
    return dropped


def mask(like: Tensor, shape: tuple[int, ...], p: float, training: bool) -> Tensor | None:
    """What `dropout` multiplies by, of this shape and the type of `like`, to be used more than once; None: nothing."""
    return dropout(like.new_ones(shape), p, training) if training and p else None


def masked(inputs: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T, D) or (B, D), times (B, D) -> the shape of the inputs."""
    if mask is None:
        return inputs
    return inputs * (mask[:, None] if inputs.dim() > mask.dim() else mask)


def zoneout(new: Tensor, before: Tensor, p: float, training: bool) -> Tensor:
    """Each element is what it was before with probability p; in evaluation the mean of that   (Krueger et al. 2017)."""
    before = before.to(new.dtype)
    if not training:
        return torch.lerp(new, before, p)
    if p == 1:
        return before
    kept = _random_bits(new) < _limit(p) if new.device.type == "cpu" else torch.rand_like(new) < p
    return torch.where(kept, before, new)


def _random_bits(like: Tensor) -> Tensor:
    """int16, all values equally likely: a quarter of a 64-bit number for each element."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[: like.numel()].view(like.shape)


def _limit(p: float) -> int:
    """The share p < 1 of all int16 lies below it; one more than the largest would wrap around."""
    return min(round(p * (1 << _BITS)), (1 << _BITS) - 1) - (1 << _BITS - 1)
