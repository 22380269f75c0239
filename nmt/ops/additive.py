"""Energies of additive attention in little memory, with a hand-written gradient.

Shapes: B batch, S source positions, T target positions, A attention, F features.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    """e_ts = v . tanh(q_t + k_s + P f_s): (B, T, A), (B, S, A), v (1, A), f (B, S, F), P (A, F) -> (B, T, S), float32
    or wider.

    The hidden units (B, T, S, A) are not stored: the backward pass recomputes them from the features and the keys, of
    which a loop stores one copy. They are computed as tanh(x) = 2 sigmoid(2 x) - 1, which is several times faster on a
    CPU:  e = 2 v . sigmoid(2 q + 2 k + 2 P f) - sum(v). Without features, sigmoid(2 q + 2 k) = 1 / (1 + e^-2q e^-2k):
    each exponential is computed once, not for every pair of query and key.
    """
    shared = defer_gradient(
        (keys, weight, projection), _gradients, _exponentials if _factorises(keys, features) else _doubled
    )
    if not torch.is_grad_enabled():
        return _energies(query, features, *shared.values)
    energies: Tensor = _Energies.apply(query, features, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
    return energies


def _factorises(keys: Tensor, features: Tensor | None) -> bool:
    """Is sigmoid(2 q + 2 k) computed from an exponential of each? On a GPU that would only add kernels."""
    return features is None and keys.device.type == "cpu"


def _energies(query: Tensor, features: Tensor | None, *values: Tensor | None) -> Tensor:
    """values: as `_doubled` or `_exponentials` returns them -> (B, T, S)."""
    keys, weight, total, projection = cast(tuple[Tensor, ...], values)
    query = query.to(keys.dtype)
    features = None if features is None else features.to(keys.dtype)
    with torch.autocast(keys.device.type, enabled=False):  # energies stay in float32
        hidden = _hidden_units(keys, features, projection)
        blocks = list(_blocks(query, keys))
        if len(blocks) == 1:
            return (hidden(query, *blocks[0]) @ weight).sub_(total)
        energies = keys.new_empty(*query.shape[:2], keys.shape[1])
        for block, steps in blocks:
            energies[block, steps] = hidden(query, block, steps) @ weight
    return energies.sub_(total)


def _blocks(query: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Sentences and steps whose hidden units are computed together."""
    (B, T, _), (_, S, A) = query.shape, keys.shape
    most = CACHED_NUMBERS if keys.device.type == "cpu" else MAX_NUMBERS
    steps = min(T, max(1, most // (S * A)))
    sentences = max(1, most // (steps * S * A))
    for b in range(0, B, sentences):
        for t in range(0, T, steps):
            yield slice(b, b + sentences), slice(t, t + steps)


def _doubled(keys: Tensor, weight: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
    """2 k, 2 v, sum(v) and 2 P, in float32 or wider."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    doubled = 2 * weight[0].to(wide)
    projection = keys.new_empty(keys.shape[-1], 0) if projection is None else projection
    return 2 * keys.to(wide), doubled, doubled.sum() / 2, 2 * projection.to(wide)


def _exponentials(keys: Tensor, weight: Tensor, projection: Tensor | None) -> tuple[Tensor, ...]:
    """e^-2k, and the rest as `_doubled`."""
    keys, *others = _doubled(keys, weight, projection)
    return keys.clamp_(-MAX_EXPONENT, MAX_EXPONENT).neg_().exp_(), *others


class _Energies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        features: Tensor | None,
        anchor: Tensor,
        pending: list[Any],
        keys: Tensor,
        weight: Tensor,
        total: Tensor,
        projection: Tensor,
    ) -> Tensor:
        ctx.pending, ctx.dtypes = pending, (query.dtype, None if features is None else features.dtype)
        query = query.to(keys.dtype)
        features = None if features is None else features.to(keys.dtype)
        ctx.save_for_backward(query, features, keys, weight, projection)
        return _energies(query, features, keys, weight, total, projection)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, features, keys, weight, projection = ctx.saved_tensors
        query_grad = torch.empty_like(query)
        features_grad = None if features is None else torch.zeros_like(features)
        needs_sums = ctx.needs_input_grad[2]
        if needs_sums and not ctx.pending:
            ctx.pending.append(_Sums(keys, weight, projection))
        hidden_units = _hidden_units(keys, features, projection)
        for t in range(query.shape[1]):
            part = grad[:, t]
            hidden = hidden_units(query, slice(None), slice(t, t + 1))[:, 0]  # (B, S, A)
            if needs_sums:
                ctx.pending[0].weight += part.reshape(1, -1) @ hidden.flatten(0, 1) - part.sum() / 2
            slope = hidden.addcmul_(hidden, hidden, value=-1)
            query_grad[:, t] = torch.bmm(part[:, None], slope)[:, 0]
            if needs_sums:
                ctx.pending[0].keys.addcmul_(part[..., None], slope)
            if features is not None and features_grad is not None:
                if needs_sums:
                    scaled = (part[..., None] * features).flatten(0, 1)
                    ctx.pending[0].projection += slope.flatten(0, 1).t() @ scaled
                features_grad.addcmul_(part[..., None], slope @ (weight[:, None] * projection))
        query_grad = (query_grad * (2 * weight)).to(ctx.dtypes[0])
        return query_grad, None if features_grad is None else features_grad.to(ctx.dtypes[1]), *[None] * 6


class _Sums:
    """Sums over all queries: the gradients of the keys and the projection without the factor 2 v, and half of v's."""

    def __init__(self, keys: Tensor, weight: Tensor, projection: Tensor) -> None:
        self.factor = 2 * weight
        self.keys, self.projection = torch.zeros_like(keys), torch.zeros_like(projection)
        self.weight = weight.new_zeros(1, len(weight))


def _gradients(pending: list[_Sums]) -> tuple[Tensor, ...]:
    (sums,) = pending
    return sums.keys.mul_(sums.factor), sums.weight.mul_(2), sums.projection.mul_(sums.factor[:, None])


def _hidden_units(
    keys: Tensor, features: Tensor | None, projection: Tensor
) -> Callable[[Tensor, slice, slice], Tensor]:
    """Keys (B, S, A) as converted, (B, S, F), (A, F) -> the function q (B, T, A) -> sigmoid(2 q + 2 k + 2 P f)
    (b, t, S, A) of some sentences and steps."""
    if _factorises(keys, features):
        one = keys.new_ones(())

        def quotients(query: Tensor, block: slice, steps: slice) -> Tensor:
            exponential = (query[block, steps] * -2).clamp_(-MAX_EXPONENT, MAX_EXPONENT).exp_()
            return torch.addcmul(one, keys[block, None], exponential[:, :, None]).reciprocal_()

        return quotients
    updated = keys
    if features is not None:
        updated = torch.addmm(keys.flatten(0, 1), features.flatten(0, 1), projection.t()).view(keys.shape)
    return lambda query, block, steps: torch.add(updated[block, None], query[block, steps, None], alpha=2).sigmoid_()
