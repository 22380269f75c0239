"""Energies of additive attention in little memory, with the gradient by hand.

Shapes: B batch, S source positions, T target positions, A attention.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.shared import share


def additive_energies(query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """e_ts = v . tanh(q_t + k_s): (B, T, A), (B, S, A), v (1, A) -> (B, T, S), float32 or wider.

    The hidden units (B, T, S, A) are not kept but made again for the gradient, from the keys, of which a loop keeps one
    copy as long as they stay the same. They are computed as tanh(x) = 2 sigmoid(2 x) - 1, several times as fast on a
    CPU:  e = 2 v . sigmoid(2 q + 2 k) - sum(v).
    """
    shared = share((keys, weight), _sums, _doubled)
    energies: Tensor = _Energies.apply(query, shared.token, shared.gathered, *shared.values)  # type: ignore[no-untyped-call]
    return energies


def _doubled(keys: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(keys.dtype, torch.float32)
    return 2 * keys.to(wide), 2 * weight[0].to(wide)


class _Energies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        token: Tensor,
        gathered: list[Any],
        keys: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.gathered, ctx.dtype = gathered, query.dtype
        query = 2 * query.to(keys.dtype)
        ctx.save_for_backward(query, keys, weight)
        with torch.autocast(keys.device.type, enabled=False):  # which would round them
            found = [_hidden(one, keys) @ weight for one in query.unbind(1)]
        return torch.stack(found, dim=1).sub_(weight.sum() / 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, keys, weight = ctx.saved_tensors
        of_query = torch.empty_like(query)
        for t, (one, part) in enumerate(zip(query.unbind(1), grad.unbind(1), strict=True)):
            hidden = _hidden(one, keys)
            if ctx.needs_input_grad[1]:
                _add(ctx.gathered, keys, part.reshape(1, -1) @ hidden.flatten(0, 1) - part.sum() / 2, weight)
            slope = hidden.addcmul_(hidden, hidden, value=-1)
            of_query[:, t] = torch.bmm(part[:, None], slope)[:, 0]
            if ctx.needs_input_grad[1]:
                ctx.gathered[0].addcmul_(part[..., None], slope)
        return (of_query * (2 * weight)).to(ctx.dtype), None, None, None, None


def _hidden(query: Tensor, keys: Tensor) -> Tensor:
    """(B, A), (B, S, A) -> (B, S, A)."""
    return (query[:, None] + keys).sigmoid_()


def _add(gathered: list[Any], keys: Tensor, of_weight: Tensor, weight: Tensor) -> None:
    if gathered:
        gathered[1] += of_weight
    else:
        gathered.extend((torch.zeros_like(keys), of_weight, weight))


def _sums(gathered: list[Any]) -> tuple[Tensor, Tensor]:
    """From the sum of grad s (1 - s), which the keys' gradient is but for the factor, and half the weight's."""
    of_keys, of_weight, weight = gathered
    return of_keys.mul_(2 * weight), 2 * of_weight
