"""Scores: how well a query fits each key. A score knows no mask.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention, F features.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.attention.memory import Past
from nmt.attention.parts import KeyUpdate, Score
from nmt.ops.additive import additive_energies
from nmt.ops.linear import Linear, linear


class DotScore(Score):
    """e_ts = q_t . k_s   (Luong et al. 2015, eq. 7, dot)."""

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked; Q = A."""
        energies = linear(query, keys)
        if update is None:
            return energies
        slopes = query @ update.projection.to(query.dtype)  # (B, T, F)
        return energies + (slopes[:, :, None] * update.features[:, None]).sum(-1)


class ScaledDotScore(DotScore):
    """e_ts = q_t . k_s / sqrt(d), d the size of either   (Vaswani et al. 2017, eq. 1)."""

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked; Q = A."""
        return super().forward(query * query.shape[-1] ** -0.5, keys, update)


class GeneralScore(DotScore):
    """e_ts = q_t . W k_s   (Luong et al. 2015, eq. 7, general)."""

    def __init__(self, query_dim: int, memory_dim: int) -> None:
        super().__init__()
        self.key_proj = Linear(memory_dim, query_dim, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, Q), once per source sentence."""
        projected: Tensor = self.key_proj(memory)
        return projected


class AdditiveScore(Score):
    """e_ts = v . tanh(W q_t + U k_s)   (Bahdanau et al. 2015, A.1.2)."""

    def __init__(self, query_dim: int, memory_dim: int, attention_dim: int) -> None:
        super().__init__()
        self.query_proj = Linear(query_dim, attention_dim, bias=False)
        self.key_proj = Linear(memory_dim, attention_dim, bias=False)
        self.energy = Linear(attention_dim, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence."""
        projected: Tensor = self.key_proj(memory)
        return projected

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked."""
        return additive_energies(self.query_proj(query), keys, self.energy.weight, *(update or ()))


class NormedAdditiveScore(AdditiveScore):
    """e_ts = g v/|v| . tanh(W q_t + U k_s + b): additive, v weight-normalised (Salimans and Kingma 2016), with a bias
    (Raffel et al. 2017; their scalar offset belongs to the normalizer)."""

    def __init__(self, query_dim: int, memory_dim: int, attention_dim: int) -> None:
        super().__init__(query_dim, memory_dim, attention_dim)
        self.gain = nn.Parameter(torch.tensor(attention_dim**-0.5))
        self.bias = nn.Parameter(torch.zeros(attention_dim))

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence, including the bias."""
        return linear(memory, self.key_proj.weight, self.bias)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked."""
        energies: Tensor = super().forward(query, keys, update) * (self.gain / self.energy.weight.norm())
        return energies


class ConcatScore(AdditiveScore):
    """e_ts = MLP([q_t; k_s]): v . tanh(W [q_t; k_s]) (Luong et al. 2015, eq. 7, concat), with `layers` > 1 further
    hidden layers tanh(W' h + b') before v.

    W is stored as two matrices, so that the part of the keys is computed once per sentence.
    """

    def __init__(self, query_dim: int, memory_dim: int, attention_dim: int, layers: int) -> None:
        super().__init__(query_dim, memory_dim, attention_dim)
        self.deeper = nn.ModuleList(Linear(attention_dim, attention_dim) for _ in range(layers - 1))

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked."""
        if not self.deeper:
            return super().forward(query, keys, update)
        if update is not None:
            keys = keys + linear(update.features.to(keys.dtype), update.projection)
        hidden = torch.tanh(self.query_proj(query)[:, :, None] + keys[:, None])
        for layer in self.deeper:
            hidden = torch.tanh(layer(hidden))
        energies: Tensor = self.energy(hidden).squeeze(-1)
        return energies


class CosineScore(Score):
    """e_ts = beta_t cos(W q_t, k_s), beta_t = softplus(w . q_t + b) > 0   (Graves et al. 2014, eq. 5 and 6).

    As in a neural Turing machine, the decoder emits a key (W q_t) and its strength (beta_t).
    """

    def __init__(self, query_dim: int, memory_dim: int, initial_strength: float) -> None:
        super().__init__()
        self.query_proj = Linear(query_dim, memory_dim, bias=False)
        self.strength = Linear(query_dim, 1, bias=False)
        # softplus(offset) = initial_strength
        self.offset = nn.Parameter(torch.tensor(initial_strength + math.log(-math.expm1(-initial_strength))))

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, M) of length 1, once per source sentence."""
        return F.normalize(memory, dim=-1)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, M) -> (B, T, S), unmasked, each between -beta_t and beta_t. Takes no update."""
        assert update is None
        beta = F.softplus(self.strength(query) + self.offset)
        wanted = beta * F.normalize(self.query_proj(query), dim=-1)
        return linear(wanted.to(keys.dtype), keys)


class LocationScore(Score):
    """e_ts = (W q_t)_s, from the query alone   (Luong et al. 2015, eq. 8).

    The keys are the positions themselves. Positions from `max_positions` on cannot be attended to, as in Luong et al.
    """

    def __init__(self, query_dim: int, max_positions: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.positions = Linear(query_dim, max_positions, bias=False)

    def within_reach(self, valid: Tensor) -> Tensor:
        """bool (B, S) -> bool (B, S), False from `max_positions` on."""
        return valid & (torch.arange(valid.shape[1], device=valid.device) < self.max_positions)

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> float32 (B, S, 1), the positions from 0."""
        positions = torch.arange(memory.shape[1], dtype=torch.float32, device=memory.device)
        return positions[:, None].expand(memory.shape[0], -1, 1)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, 1) -> (B, T, S), unmasked. Takes no update."""
        assert update is None
        index = keys.squeeze(-1).long().clamp_(max=self.max_positions - 1)
        energies: Tensor = self.positions(query)
        return energies.gather(-1, index[:, None].expand(-1, query.shape[1], -1))


class LocationAwareScore(AdditiveScore):
    """e_ts = v . tanh(W q_t + V k_s + U f_ts + b), f_t = F * weights_{t-1}, a convolution
    (Chorowski et al. 2015, eq. 8 and 9)."""

    reads_past = True

    def __init__(self, query_dim: int, memory_dim: int, attention_dim: int, filters: int, width: int) -> None:
        """Each of the `filters` covers `width` positions, an odd number."""
        super().__init__(query_dim, memory_dim, attention_dim)
        self.filters = nn.Conv1d(1, filters, width, padding=width // 2, bias=False)
        self.filter_proj = Linear(filters, attention_dim)  # U and b

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence, including the bias."""
        return linear(memory, self.key_proj.weight, self.filter_proj.bias)

    def key_projection(self) -> Tensor:
        """U (A, F)."""
        return self.filter_proj.weight

    def key_features(self, past: Past) -> Tensor:
        """f_t (B, S, F)."""
        features: Tensor = self.filters(past.weights[:, None].to(self.filters.weight.dtype))
        return features.transpose(1, 2)
