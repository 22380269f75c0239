"""Energies of additive attention in little memory, with a hand-written gradient.

Shapes: B batch, S source positions, T target positions, A attention, F features.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.precision import wide
from nmt.ops.shared import defer_gradient

MAX_EXPONENT = 86.0  # e^86 and e^-86 are normal numbers in float32: their product is never 0 times infinity
CACHED_NUMBERS = 2**18  # hidden units computed at a time on a CPU: 1 MiB, which fit a core's cache
MAX_NUMBERS = 2**26  # elsewhere: 256 MiB


def additive_energies(
    query: Tensor,
    keys: Tensor,
    weight: Tensor,
    features: Tensor | None = None,
    projection: Tensor | None = None,
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
