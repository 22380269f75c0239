"""Dropout with a cheap mask on a CPU, where torch's own draws one random number per element and is ten times slower."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BITS = 16  # random bits per element: probabilities are exact to 2^-17


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014); variational: all positions of a sentence share one mask (Gal and Ghahramani
    2016)."""

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__(p)
        self.variational = variational

    def forward(self, inputs: Tensor) -> Tensor:
        """Any shape -> the same shape; variational: (B, T, D), or (B, D) with one vector per sentence."""
        shares = self.variational and inputs.dim() == 3  # noqa: PLR2004
        return dropout(inputs, self.p, self.training, along=1 if shares else None)

    def sentence_mask(self, like: Tensor, *shape: int) -> Tensor | None:
        """The variational mask (B, D), for callers that process positions one by one; None if each position has its
        own."""
        return mask(like, shape, self.p, self.training and self.variational)


def dropout(inputs: Tensor, p: float, training: bool, along: int | None = None) -> Tensor:
    """Zero with probability p, else divided by 1 - p. Uses torch's global generator.

    `along`: the dimension that shares one mask, such as the positions of a sentence.
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
    """A dropout mask of this shape with the type of `like`, for repeated use; None if nothing is dropped."""
    return dropout(like.new_ones(shape), p, training) if training and p else None


def masked(inputs: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T, D) or (B, D) times (B, D) -> the shape of the inputs."""
    if mask is None:
        return inputs
    return inputs * (mask[:, None] if inputs.dim() > mask.dim() else mask)


def zoneout(new: Tensor, before: Tensor, p: float, training: bool) -> Tensor:
    """Each element keeps its previous value with probability p; in evaluation its expectation   (Krueger et al.
    2017)."""
    before = before.to(new.dtype)
    if not training:
        return torch.lerp(new, before, p)
    if p == 1:
        return before
    previous = _random_bits(new) < _limit(p) if new.device.type == "cpu" else torch.rand_like(new) < p
    return torch.where(previous, before, new)


def _random_bits(like: Tensor) -> Tensor:
    """int16, uniform: each 64-bit random number serves four elements."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.int16)[: like.numel()].view(like.shape)


def _limit(p: float) -> int:
    """The int16 threshold below which a share p < 1 of all values lies. The minimum keeps p near 1 from overflowing."""
    return min(round(p * (1 << _BITS)), (1 << _BITS) - 1) - (1 << _BITS - 1)
