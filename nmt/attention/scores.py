"""Scores: how well a query fits each key. And coverage, which makes the keys of any score depend on the past.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention, F features, K Gaussians.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.attention.memory import Past
from nmt.ops.additive import additive_energies
from nmt.ops.linear import Linear, linear
from nmt.ops.precision import wide

MAX_EXPONENT = 15.0  # e^15 positions are longer than any sentence, and the square of e^15 is finite in float32


class KeyUpdate(NamedTuple):
    """What a step adds to the keys, k'_s = k_s + P f_s, as two factors: no step stores keys (B, S, A) of its own."""

    features: Tensor  # f (B, S, F)
    projection: Tensor  # P (A, F), the same at every step


class Score(nn.Module):
    """How well a query fits each key. A score knows no mask."""

    reads_past = False  # whether it has key features, or a state that moves

    def within_reach(self, valid: Tensor) -> Tensor:
        """Keep the valid positions for which the score is defined: bool (B, S) -> bool (B, S)."""
        return valid

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> (B, S, A), once per source sentence."""
        return memory

    def key_projection(self) -> Tensor | None:
        """P (A, F) of the KeyUpdate, once per batch."""
        return None

    def key_features(self, past: Past) -> Tensor | None:
        """f (B, S, F) of the KeyUpdate, at every step."""
        return None

    def move(self, query: Tensor, past: Past) -> Past:
        """Move the score's own state, such as means, to the step with this query (B, 1, Q)."""
        return past

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, A) -> (B, T, S), unmasked; `update` is added to the keys."""
        raise NotImplementedError


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
    """e_ts = q_t . k_s / sqrt(d), with d = Q = A   (Vaswani et al. 2017, eq. 1)."""

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
    """e_ts = g v/|v| . tanh(W q_t + U k_s + b): the additive score with v weight-normalised (Salimans and Kingma 2016)
    and a bias (Raffel et al. 2017; their scalar offset belongs to the normalizer)."""

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
    """e_ts = v . tanh(W [q_t; k_s])   (Luong et al. 2015, eq. 7, concat); with `layers` > 1, further hidden layers
    tanh(W' h + b') precede v.

    W is stored as two matrices, so that the product with the keys is computed once per sentence.
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

    As in a neural Turing machine, the decoder emits the key W q_t and its strength beta_t.
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
        emitted = beta * F.normalize(self.query_proj(query), dim=-1)
        return linear(emitted.to(keys.dtype), keys)


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
        """width: of each filter, in positions, an odd number."""
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


class GaussianMixtureScore(Score):
    """e_ts = log sum_k alpha_tk exp(-beta_tk (kappa_tk - s)^2), kappa_t = kappa_{t-1} + exp(.), with alpha_t, beta_t
    and the steps of kappa_t exponentials of linear functions of the query   (Graves 2013, eq. 46 to 51).

    A softmax divides the mixture by its sum over the positions. The paper does not: its context fades where no
    Gaussian is near. Positions count from 1, and kappa_0 = 0: with zero parameters, all Gaussians move along the
    diagonal, one position per step.

    The keys are the positions themselves, once for each Gaussian; the means are subtracted as a KeyUpdate.
    """

    reads_past = True

    def __init__(self, query_dim: int, components: int) -> None:
        """components: K, the number of Gaussians."""
        super().__init__()
        self.moves = Linear(query_dim, components)
        self.shapes = Linear(query_dim, 2 * components)  # log alpha, log beta

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> float32 (B, S, K), the positions from 1."""
        B, S, _ = memory.shape
        positions = torch.arange(1, S + 1, dtype=torch.float32, device=memory.device)
        return positions[:, None].expand(B, S, self.moves.out_features)

    def key_projection(self) -> Tensor:
        """The identity (K, K)."""
        return torch.eye(self.moves.out_features, device=self.moves.weight.device)

    def key_features(self, past: Past) -> Tensor:
        """-kappa_t (B, S, K), from the past moved to this step."""
        assert past.means is not None
        return -past.means[:, None].expand(-1, past.weights.shape[-1], -1)

    def move(self, query: Tensor, past: Past) -> Past:
        """Move the means to kappa_t: (B, 1, Q) -> Past."""
        steps = wide(self.moves(query))[:, 0].clamp(max=MAX_EXPONENT).exp()
        return past._replace(means=steps if past.means is None else past.means + steps)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, K) -> (B, T, S), unmasked, float32 or wider."""
        assert update is not None
        log_alpha, log_beta = wide(self.shapes(query))[:, :, None].chunk(2, dim=-1)  # (B, T, 1, K)
        squares = (keys + update.features).square()[:, None]
        return (log_alpha - log_beta.clamp(max=MAX_EXPONENT).exp() * squares).logsumexp(-1)


class Coverage(nn.Module):
    """Makes the keys of any score depend on what earlier steps attended to."""

    def keys(self, keys: Tensor) -> Tensor:
        """(B, S, A) -> (B, S, A), once per source sentence."""
        return keys

    def key_projection(self) -> Tensor:
        """P (A, F) of the KeyUpdate, once per batch."""
        raise NotImplementedError

    def key_features(self, past: Past) -> Tensor:
        """f (B, S, F) of the KeyUpdate, at every step."""
        raise NotImplementedError


class LinearCoverage(Coverage):
    """k'_s = k_s + w c_s + b, where coverage c_s is the sum of the weights that earlier steps gave to s. An additive
    score sums k'_s and the query inside its tanh   (See et al. 2017, eq. 11)."""

    def __init__(self, keys_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(keys_dim, 1))
        self.bias = nn.Parameter(torch.zeros(keys_dim))

    def keys(self, keys: Tensor) -> Tensor:
        """(B, S, A) -> (B, S, A), once per source sentence: adds b."""
        return keys + self.bias.to(keys.dtype)

    def key_projection(self) -> Tensor:
        """w (A, 1)."""
        return self.weight

    def key_features(self, past: Past) -> Tensor:
        """c (B, S, 1)."""
        return past.total[:, :, None]
