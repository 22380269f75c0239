"""Log-probabilities of given tokens, differentiable, without holding the distributions of all positions.

Shapes: N target positions, n of them, R readout, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.output_layer import probabilities, through_logits
from nmt.ops.shared import in_autocast_dtype


def linear_log_probs(readouts: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(W r + b) at the tokens: (N, R), (V, R), (V,), int64 (N,) -> (N,), float32 or wider.

    Unlike in `linear_cross_entropy`, what each is multiplied with may depend on all of them; so the logits are made
    again for the gradient.
    """
    found: Tensor = _LinearLogProbs.apply(readouts, weight, bias, tokens)  # type: ignore[no-untyped-call]
    return found


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(torch.float32, weight.dtype)
        found = torch.empty(tokens.shape, dtype=wide, device=weight.device)
        ctx.dtypes = readouts.dtype, weight.dtype, bias.dtype
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        ctx.save_for_backward(readouts, weight, bias, tokens)

        def criterion(logits: Tensor, few: slice) -> None:
            _, right, log_sum = probabilities(logits[0], tokens[few, None], wide)
            found[few] = (right - log_sum)[:, 0]

        through_logits(readouts[None], weight, bias, found, criterion)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        readouts, weight, bias, tokens = ctx.saved_tensors

        def criterion(logits: Tensor, few: slice) -> Tensor:
            target = tokens[few, None]
            probs = logits.softmax(-1, dtype=grad.dtype)
            return probs.scatter_add_(-1, target[None], probs.new_full((), -1.0).expand(1, *target.shape))

        found = through_logits(readouts[None], weight, bias, -grad, criterion)
        assert found is not None
        of_readouts, of_weight, of_bias = (part.to(dtype) for part, dtype in zip(found, ctx.dtypes, strict=True))
        return of_readouts[0], of_weight, of_bias, None
