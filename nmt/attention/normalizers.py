"""Normalizers: from energies to weights.

Shapes: B batch, T target positions, W source positions of the window (S where it is global).
"""

import torch
from entmax import entmax15, sparsemax
from torch import Tensor, nn

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer
from nmt.ops.precision import wide, wide_dtype


class SoftmaxNormalizer(Normalizer):
    """w = exp(e / temperature) / sum, over the positions in `keep`."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature
        self.with_log_weights = False  # for guided alignment and variational attention

    @property
    def takes_masked(self) -> bool:  # type: ignore[override]
        """Does it also take energies that are masked already, with None for `keep`?"""
        return not self.with_log_weights

    def forward(self, energies: Tensor, keep: Tensor | None, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) or None -> weights (B, T, W)."""
        dtype = wide_dtype(energies.dtype)
        if self.temperature != 1.0:
            energies = energies.to(dtype) / self.temperature  # in float16, the quotient may be too large
        if keep is None:
            return Normalized(energies.softmax(-1, dtype=dtype))
        drop = ~keep
        masked = energies.masked_fill(drop, torch.finfo(energies.dtype).min)
        if self.with_log_weights:
            log_weights = masked.log_softmax(-1, dtype=dtype)
            return Normalized(log_weights.exp().masked_fill(drop, 0.0), log_weights.masked_fill(drop, -torch.inf))
        return Normalized(masked.softmax(-1, dtype=dtype).masked_fill(drop, 0.0))


class SparsemaxNormalizer(Normalizer):
    """The distribution nearest to the energies: zeros where they are low   (Martins and Astudillo 2016, eq. 2)."""

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        drop = ~keep
        weights: Tensor = sparsemax(_masked(energies, drop), dim=-1)
        return Normalized(weights.masked_fill(drop, 0.0))


class EntmaxNormalizer(Normalizer):
    """1.5-entmax, between softmax and sparsemax: w = max(e / 2 - tau, 0)^2   (Peters et al. 2019, 3)."""

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, T, W), bool (B, 1 or T, W) -> weights (B, T, W)."""
        drop = ~keep
        weights: Tensor = entmax15(_masked(energies, drop), dim=-1)
        return Normalized(weights.masked_fill(drop, 0.0))


class FirstOrderNormalizer(Normalizer):
    """The position depends on the previous one: w_s = sum_{s'} w'_{s'} p(s | s'), w' the weights of the previous step,
    with p(s | s') = exp(e_s + b(s - s')) / sum (Shankar and Sarawagi 2019, eq. 4 and 6). The first step has no bias.

    The bias b is learned for distances up to `reach`, and 0 for larger ones. If monotonic, it is -infinity for negative
    distances (Wu and Cotterell 2019, 3.1; their transitions also read the states).
    """

    reads_past = True

    def __init__(self, reach: int, monotonic: bool) -> None:
        super().__init__()
        self.reach, self.monotonic = reach, monotonic
        self.bias = nn.Parameter(torch.zeros(2 * reach + 1 if not monotonic else reach + 1))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W)."""
        assert energies.shape[1] == 1
        drop = ~keep
        if past.step == 0:
            return Normalized(_masked(energies, drop).softmax(-1).masked_fill(drop, 0.0))
        weights = (past.weights[:, :, None] * self.transitions(energies, keep)).sum(1, keepdim=True)
        return Normalized(weights.masked_fill(drop, 0.0))

    def transitions(self, energies: Tensor, keep: Tensor) -> Tensor:
        """(B, 1, W), bool (B, 1, W) -> p(s | s') (B, W', W)."""
        allowed = keep
        W = energies.shape[-1]
        positions = torch.arange(W, device=energies.device)
        distances = positions - positions[:, None]  # (W', W), from the previous position s' to s
        nearest = distances.clamp(0 if self.monotonic else -self.reach, self.reach)
        bias = self.bias[nearest + (0 if self.monotonic else self.reach)]
        bias = bias.masked_fill(nearest != distances, 0.0)
        if self.monotonic:
            allowed = keep & (distances >= 0)
        return _masked(wide(energies) + bias, ~allowed).softmax(-1)


def _masked(energies: Tensor, drop: Tensor) -> Tensor:
    """In float32 or wider. The lowest finite number instead of -inf avoids NaN in rows without any position."""
    energies = wide(energies)
    return energies.masked_fill(drop, torch.finfo(energies.dtype).min)
