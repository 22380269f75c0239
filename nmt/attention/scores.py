"""Scores: how well a query fits each source position. Coverage makes the keys of any score depend on the past.

`Score` defines the letters of the equations. The end of this file computes the energies of the additive score in little
memory, with a gradient written by hand.

Shapes: B batch, S source positions, T target positions, Q size of a query, M size of an encoder state, A size of a key,
F features, K Gaussians.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nmt.ops.products import Buffer, Linear, Uses, defer, in_autocast_dtype, linear, uses_of, wide

# `GaussianMixtureScore` limits the logarithms of its steps and of beta to this: no sentence is as long as e^15
# positions, and the square of e^15 is finite in float32.
MAX_LOG_STEP = 15.0
MAX_EXPONENT = 86.0  # e^86 and e^-86 are normal numbers in float32, so that no product is 0 times infinity
CACHED_NUMBERS = 2**18  # hidden units computed at a time on a CPU: 1 MiB, which fits a core's cache
MAX_NUMBERS = 2**26  # hidden units computed at a time on other devices: 256 MiB


class Past(NamedTuple):
    """What earlier steps attended to. If the attention does not read the past, only `step` is updated."""

    weights: Tensor  # (B, S), or (B, N, S) with N heads: weights of the previous step; zeros at the first step
    total: Tensor  # (B, S) or (B, N, S): sum of the weights of all earlier steps (coverage)
    step: int  # index of the next step, from 0
    log_stops: Tensor | None = None  # (B, S) or (B, N, S): log-probability that monotonic reading stopped at position s
    # (B, K) or (B, N, K): means of the K Gaussians of `GaussianMixtureScore`, as positions from 1; None before any step
    means: Tensor | None = None

    @classmethod
    def initial(cls, valid: Tensor) -> Self:
        """Make the `Past` that the first step reads: bool (B, S) or (B, N, S)."""
        nothing = torch.zeros(valid.shape, device=valid.device)
        return cls(nothing, nothing, 0)

    def after(self, weights: Tensor, log_stops: Tensor | None) -> Self:
        """Return the past that also contains a step with these weights (..., 1, S) and log_stops (..., 1, S)."""
        weights = weights.squeeze(-2)
        log_stops = None if log_stops is None else log_stops.squeeze(-2)
        return self._replace(weights=weights, total=self.total + weights, step=self.step + 1, log_stops=log_stops)

    def corrected(self, weights: Tensor) -> Self:
        """Replace the weights of the previous step by these weights (B, S), and correct the total."""
        return self._replace(weights=weights, total=self.total - self.weights + weights)


class KeyUpdate(NamedTuple):
    """What a step adds to the keys: k'_s = k_s + P f_s. P and f are kept apart, because their product (B, S, A) would
    need new memory at each step."""

    features: Tensor  # f (B, S, F), which differs between steps
    projection: Tensor  # P (A, F), the same at every step


class Score(nn.Module):
    """Computes how well a query fits each key. A score does not see which positions are valid. A score whose energies
    depend on earlier steps changes its keys by a `KeyUpdate`.

    In the equations of the scores, e_ts is the energy of source position s at target position t. h_s is the encoder
    state, k_s the key and q_t the query. Letters that a class does not define are learned parameters.
    """

    def defined_at(self, valid: Tensor) -> Tensor:
        """Keep only those valid positions for which the score is defined: bool (B, S) -> bool (B, S)."""
        return valid

    def keys(self, memory: Tensor) -> Tensor:
        """Compute the keys, once per source sentence: (B, S, M) -> (B, S, A)."""
        return memory

    def key_projection(self) -> Tensor | None:
        """Compute the projection P (A, F) of the `KeyUpdate`, once per batch; None if the score has no update."""
        return None

    def key_features(self, past: Past) -> Tensor | None:
        """Compute the features f (B, S, F) of the `KeyUpdate`, at every step; None if the score has no update."""
        return None

    def update_past(self, query: Tensor, past: Past) -> Past:
        """Update what the score itself keeps in the past, such as means of Gaussians: query (B, 1, Q) -> Past."""
        return past

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """Compute energies without a mask: (B, T, Q), (B, S, A) -> (B, T, S). `update` is added to the keys."""
        raise NotImplementedError


class DotScore(Score):
    """Computes e_ts = q_t . h_s, with Q = M   (Luong et al. 2015, eq. 7, dot)."""

    def keys(self, memory: Tensor) -> Tensor:
        """Return the encoder states as keys, in the dtype of products: (B, S, M) -> (B, S, M)."""
        return in_autocast_dtype(memory)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        energies = linear(query, keys)
        if update is None:
            return energies
        slopes = query @ update.projection.to(query.dtype)  # (B, T, F)
        return energies + (slopes[:, :, None] * update.features[:, None]).sum(-1)


class ScaledDotScore(DotScore):
    """Computes e_ts = q_t . h_s / sqrt(d), with d = Q = A   (Vaswani et al. 2017, eq. 1)."""

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        return super().forward(query * query.shape[-1] ** -0.5, keys, update)


class GeneralScore(DotScore):
    """Computes e_ts = q_t . W h_s   (Luong et al. 2015, eq. 7, general), where W = V / sqrt(Q) and V (Q, M) is learned.

    The paper learns W itself, by plain gradient descent. With Adam, an update moves each element of a matrix by about
    the learning rate. The change of an energy therefore grows with Q and M. The division by sqrt(Q) makes this change
    smaller, and does not limit what the score can represent.
    """

    def __init__(self, query_dim: int, memory_dim: int) -> None:
        super().__init__()
        self.bilinear = Linear(memory_dim, query_dim, bias=False)
        self.scale: float = query_dim**-0.5

    def keys(self, memory: Tensor) -> Tensor:
        """Compute the keys W h_s, once per source sentence: (B, S, M) -> (B, S, Q)."""
        projected: Tensor = self.bilinear(memory)
        return self.scale * projected


class AdditiveScore(Score):
    """Computes e_ts = v . tanh(W q_t + U h_s)   (Bahdanau et al. 2015, A.1.2)."""

    def __init__(self, query_dim: int, memory_dim: int, dim: int) -> None:
        super().__init__()
        self.query_proj = Linear(query_dim, dim, bias=False)
        self.key_proj = Linear(memory_dim, dim, bias=False)
        self.energy = Linear(dim, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        projected: Tensor = self.key_proj(memory)
        return projected

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        return additive_energies(self.query_proj(query), keys, self.energy.weight, *(update or ()))


class NormedAdditiveScore(AdditiveScore):
    """Computes e_ts = g v/|v| . tanh(W q_t + U h_s + b), the additive score with a bias b and weight normalisation of v
    (Raffel et al. 2017).

    Weight normalisation replaces the length of v by a learned number g (Salimans and Kingma 2016). The scalar offset r
    of Raffel et al. is a parameter of `MonotonicNormalizer`.
    """

    def __init__(self, query_dim: int, memory_dim: int, dim: int) -> None:
        super().__init__(query_dim, memory_dim, dim)
        self.gain = nn.Parameter(torch.tensor(dim**-0.5))
        self.bias = nn.Parameter(torch.zeros(dim))

    def keys(self, memory: Tensor) -> Tensor:
        """Compute the keys U h_s + b, once per source sentence: (B, S, M) -> (B, S, A)."""
        return linear(memory, self.key_proj.weight, self.bias)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        energies: Tensor = super().forward(query, keys, update) * (self.gain / self.energy.weight.norm())
        return energies


class ConcatScore(AdditiveScore):
    """Computes e_ts = v . tanh(W [q_t; h_s])   (Luong et al. 2015, eq. 7, concat). With `layers` > 1, the hidden units
    pass through layers - 1 more layers, x -> tanh(W' x + b'), before the product with v.

    W is stored as two matrices, one for q_t and one for h_s. The product of the second with h_s is the key,
    computed once per sentence.
    """

    def __init__(self, query_dim: int, memory_dim: int, dim: int, layers: int) -> None:
        super().__init__(query_dim, memory_dim, dim)
        self.deeper = nn.ModuleList(Linear(dim, dim) for _ in range(layers - 1))

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
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
    """Computes e_ts = beta_t cos(W q_t, h_s), beta_t = softplus(w . q_t + b) > 0   (Graves et al. 2014, eq. 5 and 6).

    In the neural Turing machine of the paper, the controller emits W q_t, which the paper calls the key, and the key
    strength beta_t.
    """

    def __init__(self, query_dim: int, memory_dim: int, initial_strength: float) -> None:
        super().__init__()
        self.query_proj = Linear(query_dim, memory_dim, bias=False)
        self.strength = Linear(query_dim, 1, bias=False)
        # the number whose softplus is initial_strength
        self.offset = nn.Parameter(torch.tensor(initial_strength + math.log(-math.expm1(-initial_strength))))

    def keys(self, memory: Tensor) -> Tensor:
        """Scale the encoder states to length 1, once per source sentence: (B, S, M) -> (B, S, M)."""
        return F.normalize(memory, dim=-1)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """Compute energies without a mask: (B, T, Q), (B, S, M) -> (B, T, S). `update` must be None."""
        assert update is None
        beta = F.softplus(self.strength(query) + self.offset)
        emitted = beta * F.normalize(self.query_proj(query), dim=-1)
        return linear(emitted.to(keys.dtype), keys)


class LocationScore(Score):
    """Computes e_ts = (W q_t)_s, component s of a vector that depends on the query alone   (Luong et al. 2015, eq. 8).

    The keys are the numbers of the positions. Positions from `max_positions` on cannot be attended to, as in the paper.
    """

    def __init__(self, query_dim: int, max_positions: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.positions = Linear(query_dim, max_positions, bias=False)

    def defined_at(self, valid: Tensor) -> Tensor:
        """Keep only the valid positions below `max_positions`: bool (B, S) -> bool (B, S)."""
        return valid & (torch.arange(valid.shape[1], device=valid.device) < self.max_positions)

    def keys(self, memory: Tensor) -> Tensor:
        """Return the positions, from 0, as keys: (B, S, M) -> float32 (B, S, 1)."""
        positions = torch.arange(memory.shape[1], dtype=torch.float32, device=memory.device)
        return positions[:, None].expand(memory.shape[0], -1, 1)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """Compute energies without a mask: (B, T, Q), (B, S, 1) -> (B, T, S). `update` must be None."""
        assert update is None
        index = keys.squeeze(-1).long().clamp_(max=self.max_positions - 1)
        energies: Tensor = self.positions(query)
        return energies.gather(-1, index[:, None].expand(-1, query.shape[1], -1))


class LocationAwareScore(AdditiveScore):
    """Computes e_ts = v . tanh(W q_t + V h_s + U f_ts + b), where the features f_t are a convolution of the previous
    step's weights with learned filters   (Chorowski et al. 2015, eq. 8 and 9)."""

    def __init__(self, query_dim: int, memory_dim: int, dim: int, filters: int, width: int) -> None:
        """filters: F, the number of filters. width: the odd number of source positions that a filter spans."""
        super().__init__(query_dim, memory_dim, dim)
        self.filters = nn.Conv1d(1, filters, width, padding=width // 2, bias=False)
        self.filter_proj = Linear(filters, dim)  # U and b

    def keys(self, memory: Tensor) -> Tensor:
        """Compute the keys V h_s + b, once per source sentence: (B, S, M) -> (B, S, A)."""
        return linear(memory, self.key_proj.weight, self.filter_proj.bias)

    def key_projection(self) -> Tensor:
        """Return U (A, F), the projection of the `KeyUpdate`."""
        return self.filter_proj.weight

    def key_features(self, past: Past) -> Tensor:
        """Compute the features f_t (B, S, F) from the weights of the previous step."""
        features: Tensor = self.filters(past.weights[:, None].to(self.filters.weight.dtype))
        return features.transpose(1, 2)


class GaussianMixtureScore(Score):
    """Computes e_ts = log sum_k alpha_tk exp(-beta_tk (kappa_tk - s)^2), the logarithm of a mixture of K Gaussians with
    means kappa_tk   (Graves 2013, eq. 46 to 51). alpha_tk, beta_tk and the step kappa_tk - kappa_{t-1,k} are
    exponentials of linear functions of the query.

    A softmax over the energies divides the mixture by its sum over the positions. The paper omits this division, so
    that its context vanishes if no Gaussian is near a position. Positions count from 1, and the means start at
    kappa_0k = 0. If the linear functions are 0, each Gaussian moves by one position per step.

    A key is the number of its position, repeated for each Gaussian. At each step, a `KeyUpdate`
    subtracts the means from the keys.
    """

    def __init__(self, query_dim: int, components: int) -> None:
        """components: K, the number of Gaussians."""
        super().__init__()
        self.moves = Linear(query_dim, components)
        self.shapes = Linear(query_dim, 2 * components)  # log alpha, log beta

    def keys(self, memory: Tensor) -> Tensor:
        """Return the positions, from 1, as keys: (B, S, M) -> float32 (B, S, K)."""
        B, S, _ = memory.shape
        positions = torch.arange(1, S + 1, dtype=torch.float32, device=memory.device)
        return positions[:, None].expand(B, S, self.moves.out_features)

    def key_projection(self) -> Tensor:
        """Return the identity (K, K) as the projection of the `KeyUpdate`."""
        return torch.eye(self.moves.out_features, device=self.moves.weight.device)

    def key_features(self, past: Past) -> Tensor:
        """Return the features -kappa_t (B, S, K). `move` must have computed the means kappa_t before."""
        assert past.means is not None
        return -past.means[:, None].expand(-1, past.weights.shape[-1], -1)

    def update_past(self, query: Tensor, past: Past) -> Past:
        """Move the means from kappa_{t-1} to kappa_t: query (B, 1, Q) -> Past."""
        steps = wide(self.moves(query))[:, 0].clamp(max=MAX_LOG_STEP).exp()
        return past._replace(means=steps if past.means is None else past.means + steps)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """Compute energies without a mask: (B, T, Q), (B, S, K) -> (B, T, S), float32 or wider."""
        assert update is not None
        log_alpha, log_beta = wide(self.shapes(query))[:, :, None].chunk(2, dim=-1)  # (B, T, 1, K)
        squares = (keys + update.features).square()[:, None]
        return (log_alpha - log_beta.clamp(max=MAX_LOG_STEP).exp() * squares).logsumexp(-1)


class LinearCoverage(nn.Module):
    """Adds coverage to the keys: k'_s = k_s + w c_s + b, where c_s is the sum of the weights that earlier steps gave to
    position s. With the additive score, the energies are v . tanh(W q_t + k'_s), as in See et al. 2017, eq. 11."""

    def __init__(self, keys_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(keys_dim, 1))
        self.bias = nn.Parameter(torch.zeros(keys_dim))

    def keys(self, keys: Tensor) -> Tensor:
        """Add b to the keys of the score, once per source sentence: (B, S, A) -> (B, S, A)."""
        return keys + self.bias.to(keys.dtype)

    def key_projection(self) -> Tensor:
        """Return w (A, 1), the projection of the `KeyUpdate`."""
        return self.weight

    def key_features(self, past: Past) -> Tensor:
        """Return the coverage c (B, S, 1), the features of the `KeyUpdate`."""
        return past.total[:, :, None]


def additive_energies(
    query: Tensor, keys: Tensor, weight: Tensor, features: Tensor | None = None, projection: Tensor | None = None
) -> Tensor:
    """Compute e_ts = v . tanh(q_t + k_s + P f_s): (B, T, A), (B, S, A), v (1, A), f (B, S, F), P (A, F) -> (B, T, S),
    float32 or wider.

    The hidden units (B, T, S, A), which are the values of tanh, are not stored. The backward pass computes them again
    from the queries, the features and the keys. Calls with the same deferred keys (nmt.ops.products) share one copy of
    the keys, and one sum of the gradients of each of keys, weight and projection.

    On a CPU, the logistic function sigmoid, which is several times faster, replaces tanh. As tanh(x) =
    2 sigmoid(2 x) - 1, the energies are 2 v . sigmoid(2 q + 2 k + 2 P f) - sum(v). Without features, sigmoid(2 q + 2 k)
    is computed as 1 / (1 + e^-2q e^-2k): each exponential is computed once, not once for each pair of query and key. In
    the exponentials, q and k are clamped to [-43, 43]. The clamping matters only where q and k have opposite signs, and
    both |q| and |k| are near 43 or greater.
    """
    if (uses := uses_of(keys)) is None:
        (keys,) = defer(keys, cast=False)
        uses = uses_of(keys)
    assert uses is not None
    if uses.converted is None:
        with torch.no_grad():
            constants = _step_constants(keys.detach(), weight, projection)
        uses.converted = constants, defer(weight, projection, cast=False)
    constants, parameters = uses.converted
    if not torch.is_grad_enabled():
        return _energies(query, features, constants)
    energies: Tensor = _Energies.apply(query, features, keys, *parameters, uses, *constants)  # type: ignore[no-untyped-call]
    return energies


def prefers_sigmoid(keys: Tensor) -> bool:
    """Check if `additive_energies` replaces tanh for these keys. On a GPU, the replacement would only add kernels."""
    return keys.device.type == "cpu"


class _StepConstants(NamedTuple):
    """What `additive_energies` computes once for all steps, in float32 or wider, either for tanh or for the logistic
    function, sigmoid: then 2 v . sigmoid(2 q + 2 k + 2 P f) - sum(v) replaces v . tanh(q + k + P f)."""

    keys: Tensor  # (B, S, A): k with tanh; 2 k with the logistic function, or e^-2k if there are no features
    weight: Tensor  # (A,): v with tanh, 2 v with the logistic function
    slope: Tensor  # (A,): v with tanh, 4 v with the logistic function; multiplies the derivative of either function
    projection: Tensor  # (A, F): P; without features (A, 0)
    one: Tensor  # (): the number 1
    sigmoid_offset: Tensor | None  # (): sum(v), which energies lack with the logistic function; None with tanh


def _step_constants(keys: Tensor, weight: Tensor, projection: Tensor | None) -> _StepConstants:
    """Compute the constants from keys k (B, S, A), v (1, A) and P (A, F); P is None if there are no features."""
    keys = wide(keys)
    weight = weight[0].to(keys.dtype)
    one = weight.new_ones(())
    matrix = keys.new_empty(keys.shape[-1], 0) if projection is None else projection.to(keys.dtype)
    if not prefers_sigmoid(keys):
        return _StepConstants(keys, weight, weight, matrix, one, None)
    keys = 2 * keys
    if projection is None:
        keys = keys.clamp_(-MAX_EXPONENT, MAX_EXPONENT).neg_().exp_()
    return _StepConstants(keys, 2 * weight, 4 * weight, matrix, one, weight.sum())


def _energies(query: Tensor, features: Tensor | None, constants: _StepConstants) -> Tensor:
    """Compute energies, block by block: queries (B, T, A), features (B, S, F) or None -> (B, T, S). With tanh, they are
    v . hidden units, and with the logistic function 2 v . hidden units - sum(v)."""
    query = query.to(constants.keys.dtype)
    features = None if features is None else features.to(constants.keys.dtype)
    with torch.autocast(query.device.type, enabled=False):  # energies stay in float32
        hidden = _hidden_units(features, constants)
        blocks = list(_blocks(query, constants.keys))
        if len(blocks) == 1:
            energies = hidden(query, *blocks[0]) @ constants.weight
        else:
            energies = query.new_empty(*query.shape[:2], constants.keys.shape[1])
            for block, steps in blocks:
                energies[block, steps] = hidden(query, block, steps) @ constants.weight
    return energies if constants.sigmoid_offset is None else energies.sub_(constants.sigmoid_offset)


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Divide sentences and steps into blocks whose hidden units fit in the cache. Yield each block's slices of both."""
    (B, T, _), (_, S, A) = query.shape, keys.shape
    most = CACHED_NUMBERS if keys.device.type == "cpu" else MAX_NUMBERS
    steps = min(T, max(1, most // (S * A)))
    sentences = max(1, most // (steps * S * A))
    for b in range(0, B, sentences):
        for t in range(0, T, steps):
            yield slice(b, b + sentences), slice(t, t + steps)


class _Energies(torch.autograd.Function):
    """Computes `_energies`. Its backward pass goes step by step, and computes the hidden units again."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        features: Tensor | None,
        keys: Tensor,
        weight: Tensor,
        projection: Tensor | None,
        uses: Uses,
        *constants: Tensor,
    ) -> Tensor:
        read = _StepConstants(*constants)
        ctx.uses, ctx.parameter_uses = uses, uses_of(weight)
        ctx.dtypes = query.dtype, None if features is None else features.dtype
        query = query.to(read.keys.dtype)
        features = None if features is None else features.to(read.keys.dtype)
        ctx.save_for_backward(query, features, *constants)
        return _energies(query, features, read)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, features, *saved = ctx.saved_tensors
        constants = _StepConstants(*saved)
        keys = parameters = None
        if ctx.needs_input_grad[2]:
            keys = ctx.uses.sums(Buffer, lambda: Buffer(torch.zeros_like(constants.keys), constants.slope))
        if ctx.needs_input_grad[3]:
            parameters = ctx.parameter_uses.sums(_ParameterSums, lambda: _ParameterSums(constants))
        hidden_units = _hidden_units(features, constants)
        query_grads, features_grad = [], None if features is None else torch.zeros_like(features)
        for t in range(query.shape[1]):
            part = grad[:, t]
            hidden = hidden_units(query, slice(None), slice(t, t + 1))[:, 0]  # (B, S, A)
            if parameters is not None:
                parameters.weight.addmm_(part.reshape(1, -1), hidden.flatten(0, 1))
                if constants.sigmoid_offset is not None:
                    parameters.grads += part
            if constants.sigmoid_offset is None:  # the derivative of tanh, or of the logistic function, from its value
                slope = torch.addcmul(constants.one, hidden, hidden, value=-1)
            else:
                slope = hidden.addcmul_(hidden, hidden, value=-1)
            query_grads.append(torch.bmm(part[:, None], slope))
            if keys is not None:
                keys.total.addcmul_(part[..., None], slope)
            if features_grad is not None:
                if parameters is not None:
                    parameters.projection += slope.flatten(0, 1).t() @ (part[..., None] * features).flatten(0, 1)
                features_grad.addcmul_(part[..., None], slope @ (constants.slope[:, None] * constants.projection))
        query_grad = query_grads[0] if len(query_grads) == 1 else torch.cat(query_grads, dim=1)
        query_grad = (query_grad * constants.slope).to(ctx.dtypes[0])
        return query_grad, None if features_grad is None else features_grad.to(ctx.dtypes[1]), *[None] * 10


class _ParameterSums:
    """Adds up the gradients of v (1, A) and P (A, F) over all queries."""

    def __init__(self, constants: _StepConstants) -> None:
        self.constants, keys = constants, constants.keys
        self.weight, self.projection = keys.new_zeros(1, keys.shape[-1]), torch.zeros_like(constants.projection)
        # (B, S) sum of the gradients of the energies. With the logistic function, the derivative of an energy with
        # respect to v is 2 sigmoid(..) - 1, so that `gradients` subtracts this sum.
        self.grads = keys.new_zeros(keys.shape[:2])

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of v and of P."""
        weight = self.weight if self.constants.sigmoid_offset is None else self.weight.mul_(2).sub_(self.grads.sum())
        return weight, self.projection.mul_(self.constants.slope[:, None])


def _hidden_units(features: Tensor | None, constants: _StepConstants) -> Callable[[Tensor, slice, slice], Tensor]:
    """Make a function that computes the hidden units of one block, tanh(q + k + P f) or sigmoid(2 q + 2 k + 2 P f):
    all queries (B, T, A), slice of b sentences, slice of t steps -> (b, t, S, A)."""
    keys = constants.keys
    if constants.sigmoid_offset is not None and features is None:

        def quotients(query: Tensor, block: slice, steps: slice) -> Tensor:
            exponential = (query[block, steps] * -2).clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp_()
            return torch.addcmul(constants.one, keys[block, None], exponential[:, :, None]).reciprocal_()

        return quotients
    if features is not None:
        scale = 1 if constants.sigmoid_offset is None else 2
        sums = torch.addmm(keys.flatten(0, 1), features.flatten(0, 1), constants.projection.t(), alpha=scale)
        keys = sums.view(keys.shape)
    if constants.sigmoid_offset is None:
        return lambda query, block, steps: (keys[block, None] + query[block, steps, None]).tanh_()
    return lambda query, block, steps: torch.add(keys[block, None], query[block, steps, None], alpha=2).sigmoid_()
