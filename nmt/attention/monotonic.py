"""Monotonic normalizers: reading continues from where the previous step stopped, and never goes back.

Shapes: B batch, W source positions (S, as no window goes with them).
"""

import torch
from torch import Tensor, nn

from nmt.attention.memory import Past
from nmt.attention.parts import Normalized, Normalizer, wide
from nmt.ops.monotonic import chunk_log_weights, monotonic_log_weights


class MonotonicNormalizer(Normalizer):
    """Starting from the previous step's position, each position is selected with probability p_s = sigmoid(e_s + r).

    In training: the expected weights w_s = p_s sum_{k<=s} w'_k prod_{k<=l<s} (1 - p_l), given those of the previous
    step w' (Raffel et al. 2017, eq. 9), with noise on the energies that drives p to 0 or 1. Otherwise: the first
    position with p > 1/2. The end is passed without a selected position with probability 1 - sum_s w_s; then the
    context is zero for this and all further steps, as in the paper.
    """

    reads_past = True

    def __init__(self, noise: float, initial_offset: float) -> None:
        """noise: its standard deviation; initial_offset: the initial r, negative so that reading does not stop at
        once."""
        super().__init__()
        self.noise = noise
        self.offset = nn.Parameter(torch.tensor(initial_offset))

    def forward(self, energies: Tensor, keep: Tensor, past: Past) -> Normalized:
        """(B, 1, W), bool (B, 1, W) -> weights (B, 1, W)."""
        log_weights = self._log_stops(energies, keep, past)[:, None]
        return Normalized(log_weights.exp(), log_weights, log_stops=log_weights)

    def _log_stops(self, energies: Tensor, keep: Tensor, past: Past) -> Tensor:
        """(B, 1, W), bool (B, 1, W) -> (B, W), the log-probability that reading stops at each position; outside
        training 0 at one position at most, and -inf."""
        assert energies.shape[1] == 1
        energies, keep = wide(energies)[:, 0] + self.offset, keep[:, 0]
        before = past.log_stops
        if before is None:  # at position 0
            before = torch.full_like(energies, -torch.inf)
            before[:, 0] = 0.0
        before = before.to(energies.dtype)
        if not self.training:
            return _first_from(before, (energies > 0) & keep).to(energies.dtype).log()
        if self.noise:
            energies = energies + self.noise * torch.randn_like(energies)
        return monotonic_log_weights(energies, keep, before)


class MochaNormalizer(MonotonicNormalizer):
    """Monotonic chunkwise attention: a softmax over the energies u of a second score within the chunk of n positions
    that ends where monotonic reading stops   (Chiu and Raffel 2018).

    In training: the expected weights w_s = sum_{k=s}^{s+n-1} a_k exp(u_s) / sum_{l=k-n+1}^{k} exp(u_l), a_k being the
    expected weights of monotonic attention (ibid., eq. 14). They sum to what those sum to.
    """

    def __init__(self, noise: float, initial_offset: float, chunk: int) -> None:
        """noise, initial_offset: of monotonic attention; chunk: n."""
        super().__init__(noise, initial_offset)
        self.chunk = chunk

    def forward(self, energies: Tensor, keep: Tensor, past: Past, chunk_energies: Tensor | None = None) -> Normalized:
        """(B, 1, W), bool (B, 1, W), u (B, 1, W) -> weights (B, 1, W)."""
        assert chunk_energies is not None
        log_stops = self._log_stops(energies, keep, past)
        log_weights = chunk_log_weights(log_stops, wide(chunk_energies)[:, 0], keep[:, 0], self.chunk)[:, None]
        return Normalized(log_weights.exp(), log_weights, log_stops=log_stops[:, None])


def _first_from(before: Tensor, selected: Tensor) -> Tensor:
    """(B, W), bool (B, W) -> bool (B, W): the first selected position from the one where `before` is greatest on; none
    if that is nowhere above -inf."""
    positions = torch.arange(selected.shape[1], device=selected.device)
    stopped_at = before.argmax(-1, keepdim=True)
    eligible = selected & (positions >= stopped_at) & (before > -torch.inf).any(-1, keepdim=True)
    return eligible & (eligible.cumsum(-1) == 1)
