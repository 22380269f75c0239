"""Monotonic attention: reading continues from where the previous step stopped, and never goes back.

Shapes: B batch, S source positions, W those of the window, which is global.
"""

import torch
from torch import Tensor, nn

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer, Score
from nmt.ops.monotonic import chunk_log_weights, monotonic_log_weights
from nmt.ops.precision import wide


class MonotonicNormalizer(Normalizer):
    """Starting from the previous step's position, each position is selected with probability p_s = sigmoid(e_s + r).

    In training: the expected weights w_s = p_s sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l), given those of the previous
    step w' (Raffel et al. 2017, eq. 9), with noise on the energies that drives p to 0 or 1. Otherwise: the first
    position with p > 1/2. The end is passed without a selected position with probability 1 - sum_s w_s; then the
    context is zero for this and all further steps, as in the paper.
    """

    reads_past = True
    stops = True

    def __init__(self, noise: float, initial_offset: float) -> None:
        """noise: its standard deviation; initial_offset: the initial r, negative so that reading does not stop at
        once."""
        super().__init__()
        self.noise = noise
        self.offset = nn.Parameter(torch.tensor(initial_offset))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W); outside training one of them is 1, or none."""
        assert energies.shape[1] == 1
        energies, keep = wide(energies)[:, 0] + self.offset, keep[:, 0]
        before = past.log_stops
        if before is None:  # at position 0
            before = torch.full_like(energies, -torch.inf)
            before[:, 0] = 0.0
        before = before.to(energies.dtype)
        if self.training:
            if self.noise:
                energies = energies + self.noise * torch.randn_like(energies)
            log_weights = monotonic_log_weights(energies, keep, before)[:, None]
        else:
            log_weights = _first_from(before, (energies > 0) & keep).to(energies.dtype).log()[:, None]
        return Normalized(log_weights.exp(), log_weights)


class Chunk(nn.Module):
    """Monotonic chunkwise attention: where monotonic reading stops, a chunk of n positions ends, and a softmax over the
    energies u of a second score divides the weight among them   (Chiu and Raffel 2018).

    In training: the expected weights w_s = sum_{k=s}^{s+n-1} a_k exp(u_s) / sum_{l=k-n+1}^{k} exp(u_l), a_k being the
    expected weights of monotonic attention (ibid., eq. 14). They sum to what those sum to.
    """

    def __init__(self, score: Score, size: int) -> None:
        """size: n. Coverage does not change the keys of this score."""
        super().__init__()
        self.score, self.size = score, size

    def forward(self, log_stops: Tensor, energies: Tensor, keep: Tensor) -> Normalized:
        """log a (B, 1, S), u (B, 1, S), bool (B, 1, S) -> weights (B, 1, S)."""
        log_weights = chunk_log_weights(log_stops, wide(energies), keep, self.size)
        return Normalized(log_weights.exp(), log_weights)


def _first_from(before: Tensor, selected: Tensor) -> Tensor:
    """(B, W), bool (B, W) -> bool (B, W): the first selected position from the one where `before` is greatest on; none
    if that is nowhere above -inf."""
    positions = torch.arange(selected.shape[1], device=selected.device)
    stopped_at = before.argmax(-1, keepdim=True)
    eligible = selected & (positions >= stopped_at) & (before > -torch.inf).any(-1, keepdim=True)
    return eligible & (eligible.cumsum(-1) == 1)
