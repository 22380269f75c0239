"""Scores: how well a query fits each key. And coverage, which makes the keys of any score depend on the past.

The additive score computes its energies in little memory, with a gradient by hand, at the end of this file.

Shapes: B batch, S source positions, T target positions, Q query, M memory, A attention, F features, K Gaussians.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nmt.ops.layers import Linear, defer_gradient, linear, wide

MAX_LOG_STEP = 15.0  # e^15 positions are longer than any sentence, and the square of e^15 is finite in float32
MAX_EXPONENT = 86.0  # e^86 and e^-86 are normal numbers in float32: their product is never 0 times infinity
CACHED_NUMBERS = 2**18  # hidden units computed at a time on a CPU: 1 MiB, which fit a core's cache
MAX_NUMBERS = 2**26  # elsewhere: 256 MiB


class Past(NamedTuple):
    """What earlier steps attended to. An attention that does not read the past only counts its steps."""

    weights: Tensor  # (B, S), or (B, N, S) with heads: of the previous step, zeros before the first
    total: Tensor  # the same shape: the sum of the weights of all steps (coverage)
    step: int  # index of the next step
    log_stops: Tensor | None = None  # the same shape: log-probabilities of where monotonic reading stopped
    means: Tensor | None = None  # (B, K), or (B, N, K): of a Gaussian mixture, from 1; None before the first step

    @classmethod
    def start(cls, valid: Tensor) -> Self:
        """Make the past before the first step: bool (B, S) or (B, N, S)."""
        nothing = torch.zeros(valid.shape, device=valid.device)
        return cls(nothing, nothing, 0)

    def after(self, weights: Tensor, log_stops: Tensor | None) -> Self:
        """Add a step with weights (..., 1, S)."""
        weights = weights.squeeze(-2)
        log_stops = None if log_stops is None else log_stops.squeeze(-2)
        return self._replace(weights=weights, total=self.total + weights, step=self.step + 1, log_stops=log_stops)

    def corrected(self, weights: Tensor) -> Self:
        """Replace the weights (B, S) of the previous step."""
        return self._replace(weights=weights, total=self.total - self.weights + weights)


class KeyUpdate(NamedTuple):
    """What a step adds to the keys, k'_s = k_s + P f_s, as two factors: no step stores keys (B, S, A) of its own."""

    features: Tensor  # f (B, S, F)
    projection: Tensor  # P (A, F), the same at every step


class Score(nn.Module):
    """How well a query fits each key. A score knows no mask. One that reads the past has key features."""

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
        """Return the identity (K, K)."""
        return torch.eye(self.moves.out_features, device=self.moves.weight.device)

    def key_features(self, past: Past) -> Tensor:
        """-kappa_t (B, S, K), from the past moved to this step."""
        assert past.means is not None
        return -past.means[:, None].expand(-1, past.weights.shape[-1], -1)

    def move(self, query: Tensor, past: Past) -> Past:
        """Move the means to kappa_t: (B, 1, Q) -> Past."""
        steps = wide(self.moves(query))[:, 0].clamp(max=MAX_LOG_STEP).exp()
        return past._replace(means=steps if past.means is None else past.means + steps)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, K) -> (B, T, S), unmasked, float32 or wider."""
        assert update is not None
        log_alpha, log_beta = wide(self.shapes(query))[:, :, None].chunk(2, dim=-1)  # (B, T, 1, K)
        squares = (keys + update.features).square()[:, None]
        return (log_alpha - log_beta.clamp(max=MAX_LOG_STEP).exp() * squares).logsumexp(-1)


class LinearCoverage(nn.Module):
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
        """P = w (A, 1) of the KeyUpdate, once per batch."""
        return self.weight

    def key_features(self, past: Past) -> Tensor:
        """f = c (B, S, 1) of the KeyUpdate, at every step."""
        return past.total[:, :, None]


def additive_energies(
    query: Tensor, keys: Tensor, weight: Tensor, features: Tensor | None = None, projection: Tensor | None = None
) -> Tensor:
    """Compute e_ts = v . tanh(q_t + k_s + P f_s): (B, T, A), (B, S, A), v (1, A), f (B, S, F), P (A, F) -> (B, T, S),
    float32 or wider.

    The hidden units (B, T, S, A) are not stored: the backward pass recomputes them from the features and the keys, of
    which a loop stores one copy. On a CPU they are computed as tanh(x) = 2 sigmoid(2 x) - 1, which is several times
    faster:  e = 2 v . sigmoid(2 q + 2 k + 2 P f) - sum(v).  Without features, sigmoid(2 q + 2 k) is computed as
    1 / (1 + e^-2q e^-2k): each exponential is computed once, not for every pair of query and key. There |q| and |k|
    count as at most 43, which matters only where both are larger and nearly cancel each other.
    """
    convert = _plain
    if prefers_sigmoid(keys):
        convert = _exponentials if features is None else _doubled
    shared = defer_gradient((keys, weight, projection), _gradients, convert)
    if not torch.is_grad_enabled():
        return _energies(query, features, _Values(*shared.values))  # type: ignore[arg-type]
    energies: Tensor = _Energies.apply(query, features, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
    return energies


def prefers_sigmoid(keys: Tensor) -> bool:
    """Check if the hidden units are computed from the logistic function. On a GPU that would only add kernels."""
    return keys.device.type == "cpu"


class _Values(NamedTuple):
    """What the uses read, in float32 or wider."""

    keys: Tensor  # (B, S, A) k, or 2 k, or e^-2k
    weight: Tensor  # (A,) v, or 2 v
    slope: Tensor  # (A,) v, or 4 v: the energies' derivative is this times that of tanh, or of the logistic function
    projection: Tensor  # (A, F) P; (A, 0) without features
    one: Tensor  # ()
    total: Tensor | None  # None, or sum(v)


def _plain(keys: Tensor, weight: Tensor, projection: Tensor | None) -> _Values:
    """Prepare the values for tanh."""
    keys = wide(keys)
    weight = weight[0].to(keys.dtype)
    projection = keys.new_empty(keys.shape[-1], 0) if projection is None else projection
    return _Values(keys, weight, weight, projection.to(keys.dtype), weight.new_ones(()), None)


def _doubled(keys: Tensor, weight: Tensor, projection: Tensor | None) -> _Values:
    """Prepare the values for the logistic function."""
    plain = _plain(keys, weight, projection)
    return plain._replace(
        keys=2 * plain.keys, weight=2 * plain.weight, slope=4 * plain.weight, total=plain.weight.sum()
    )


def _exponentials(keys: Tensor, weight: Tensor, projection: Tensor | None) -> _Values:
    """Prepare the values for the logistic function without features."""
    doubled = _doubled(keys, weight, projection)
    return doubled._replace(keys=doubled.keys.clamp_(-MAX_EXPONENT, MAX_EXPONENT).neg_().exp_())


def _energies(query: Tensor, features: Tensor | None, values: _Values) -> Tensor:
    """Compute energies block by block: queries (B, T, A), features (B, S, F) or None -> (B, T, S)."""
    query = query.to(values.keys.dtype)
    features = None if features is None else features.to(values.keys.dtype)
    with torch.autocast(query.device.type, enabled=False):  # energies stay in float32
        hidden = _hidden_units(features, values)
        blocks = list(_blocks(query, values.keys))
        if len(blocks) == 1:
            energies = hidden(query, *blocks[0]) @ values.weight
        else:
            energies = query.new_empty(*query.shape[:2], values.keys.shape[1])
            for block, steps in blocks:
                energies[block, steps] = hidden(query, block, steps) @ values.weight
    return energies if values.total is None else energies.sub_(values.total)


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the sentences and steps whose hidden units are computed together."""
    (B, T, _), (_, S, A) = query.shape, keys.shape
    most = CACHED_NUMBERS if keys.device.type == "cpu" else MAX_NUMBERS
    steps = min(T, max(1, most // (S * A)))
    sentences = max(1, most // (steps * S * A))
    for b in range(0, B, sentences):
        for t in range(0, T, steps):
            yield slice(b, b + sentences), slice(t, t + steps)


class _Energies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        features: Tensor | None,
        anchor: Tensor,
        pending: list[Any],
        *values: Tensor,
    ) -> Tensor:
        read = _Values(*values)
        ctx.pending, ctx.dtypes = pending, (query.dtype, None if features is None else features.dtype)
        query = query.to(read.keys.dtype)
        features = None if features is None else features.to(read.keys.dtype)
        ctx.save_for_backward(query, features, *values)
        return _energies(query, features, read)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, features, *saved = ctx.saved_tensors
        values = _Values(*saved)
        needs_sums = ctx.needs_input_grad[2]
        if needs_sums and not ctx.pending:
            ctx.pending.append(_Sums(values))
        hidden_units = _hidden_units(features, values)
        query_grads, features_grad = [], None if features is None else torch.zeros_like(features)
        for t in range(query.shape[1]):
            part = grad[:, t]
            hidden = hidden_units(query, slice(None), slice(t, t + 1))[:, 0]  # (B, S, A)
            if needs_sums:
                ctx.pending[0].add_weight(part, hidden)
            slope = _slope(hidden, values)
            query_grads.append(torch.bmm(part[:, None], slope))
            if needs_sums:
                ctx.pending[0].keys.addcmul_(part[..., None], slope)
            if features is not None and features_grad is not None:
                if needs_sums:
                    scaled = (part[..., None] * features).flatten(0, 1)
                    ctx.pending[0].projection += slope.flatten(0, 1).t() @ scaled
                features_grad.addcmul_(part[..., None], slope @ (values.slope[:, None] * values.projection))
        query_grad = query_grads[0] if len(query_grads) == 1 else torch.cat(query_grads, dim=1)
        query_grad = (query_grad * values.slope).to(ctx.dtypes[0])
        return query_grad, None if features_grad is None else features_grad.to(ctx.dtypes[1]), *[None] * 8


class _Sums:
    """Sums over all queries: the gradients of the keys and the projection without the factor v, and of v."""

    def __init__(self, values: _Values) -> None:
        self.slope, self.logistic = values.slope, values.total is not None
        self.keys, self.projection = torch.zeros_like(values.keys), torch.zeros_like(values.projection)
        self.weight = values.weight.new_zeros(1, len(values.weight))
        self.grads = values.keys.new_zeros(values.keys.shape[:2])

    def add_weight(self, grads: Tensor, hidden: Tensor) -> None:
        """Add a query's share of the gradient of v: gradients (B, S), hidden units (B, S, A)."""
        self.weight.addmm_(grads.reshape(1, -1), hidden.flatten(0, 1))
        if self.logistic:
            self.grads += grads


def _gradients(pending: list[_Sums]) -> tuple[Tensor, ...]:
    (sums,) = pending
    weight = sums.weight.mul_(2).sub_(sums.grads.sum()) if sums.logistic else sums.weight
    return sums.keys.mul_(sums.slope), weight, sums.projection.mul_(sums.slope[:, None])


def _slope(hidden: Tensor, values: _Values) -> Tensor:
    """Compute the derivative of tanh, or of the logistic function, from its value, which may be overwritten."""
    if values.total is None:
        return torch.addcmul(values.one, hidden, hidden, value=-1)
    return hidden.addcmul_(hidden, hidden, value=-1)


def _hidden_units(features: Tensor | None, values: _Values) -> Callable[[Tensor, slice, slice], Tensor]:
    """Make the function that computes the hidden units of some sentences and steps: tanh(q + k + P f), or sigmoid of
    twice that, (b, t, S, A) from all queries (B, T, A) and two slices."""
    keys = values.keys
    if values.total is not None and features is None:

        def quotients(query: Tensor, block: slice, steps: slice) -> Tensor:
            exponential = (query[block, steps] * -2).clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp_()
            return torch.addcmul(values.one, keys[block, None], exponential[:, :, None]).reciprocal_()

        return quotients
    if features is not None:
        scale = 1 if values.total is None else 2
        sums = torch.addmm(keys.flatten(0, 1), features.flatten(0, 1), values.projection.t(), alpha=scale)
        keys = sums.view(keys.shape)
    if values.total is None:
        return lambda query, block, steps: (keys[block, None] + query[block, steps, None]).tanh_()
    return lambda query, block, steps: torch.add(keys[block, None], query[block, steps, None], alpha=2).sigmoid_()
