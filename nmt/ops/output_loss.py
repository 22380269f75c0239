"""Losses of the output layer, chunk by chunk: the logits of all positions never exist at once.

A criterion is a plain, differentiable function of a chunk of logits; autograd differentiates it. Its gradient is
computed in the forward pass, while the chunk is in the cache, and then overwrites the logits.

Shapes: C copies of a batch, N target positions, n of them in a chunk, R readout, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.matmul import input_gradient, matmul, weight_gradient
from nmt.ops.precision import in_autocast_dtype, wide_dtype

CHUNK_NUMBERS = 2**24  # logits held at a time: 64 MiB in float32
CPU_NUMBERS = 2**19  # logits a criterion gets at a time on a CPU: 2 MiB in float32, which stay in its cache
GPU_NUMBERS = 2**22  # the same elsewhere

Criterion = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Logits (C, n, V) in float32 or wider, (n, ...) of other tensors -> loss to minimise (n,), terms to report (n,)."""


class OutputLoss(NamedTuple):
    """In nats, unless the criterion has another unit."""

    total: Tensor  # () the sum over the counted positions; differentiable once
    terms: dict[str, Tensor]  # (N,) each, 0 at other positions; not differentiable


def output_loss(
    readouts: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    criterion: Criterion,
    *by_position: Tensor,
    shares: Tensor | None = None,
) -> OutputLoss:
    """The criterion of the logits W r + b: (C, N, R), (V, R), (V,), bool (N,), any number of (N, ...) -> OutputLoss.

    The criterion gets the same rows of every tensor in `by_position`, and of `shares` (C, N, ...), if given, before
    these. Gradients go to readouts, weight, bias and shares.
    """
    terms: dict[str, Tensor] = {}
    total: Tensor = _OutputLoss.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, shares, counted, criterion, by_position, terms, torch.is_grad_enabled()
    )
    return OutputLoss(total, terms)


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        shares: Tensor | None,
        counted: Tensor,
        criterion: Criterion,
        by_position: tuple[Tensor, ...],
        terms: dict[str, Tensor],
        differentiate: bool,
    ) -> Tensor:
        inputs = (readouts, weight, bias) if shares is None else (readouts, weight, bias, shares)
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        dtype = wide_dtype(weight.dtype)
        factors = counted.to(dtype)
        total = factors.new_zeros(())
        reported: dict[str, list[Tensor]] = {}
        gradients = _Gradients()
        numbers = CPU_NUMBERS if weight.device.type == "cpu" else GPU_NUMBERS
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        for rows, logits in _logit_chunks(readouts, weight, bias):
            bias_gradient = bias.new_zeros(bias.shape, dtype=dtype)
            for part in slices(logits.shape[1], logits[:, 0].numel(), numbers):
                positions = slice(rows.start + part.start, rows.start + part.stop)
                own = [logits[:, part].to(dtype)] + ([] if shares is None else [shares[:, positions].to(dtype)])
                own = [tensor.detach().requires_grad_(differentiate) for tensor in own]
                with torch.set_grad_enabled(differentiate):
                    loss, named = criterion(*own, *(tensor[positions] for tensor in by_position))
                total += (loss.detach() * factors[positions]).sum()
                for name, term in named.items():
                    reported.setdefault(name, []).append(term.detach() * factors[positions])
                if differentiate:
                    gradient, *of_shares = torch.autograd.grad(loss, own, factors[positions])
                    gradients.shares += of_shares
                    bias_gradient += gradient.sum((0, 1))
                    logits[:, part] = gradient
            if differentiate:
                gradients.add(readouts[:, rows], weight, logits, bias_gradient)
        terms.update({name: torch.cat(parts) for name, parts in reported.items()})
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.gradients is None:
            raise RuntimeError("the loss can go backward only once")  # the gradients are scaled in place, not copied
        gradients, ctx.gradients = ctx.gradients, None
        joined = [torch.cat(parts, 1) for parts in (gradients.readouts, gradients.shares) if parts]
        of_readouts, *of_shares = joined
        scaled = (gradient.mul_(factor) for gradient in (of_readouts, *gradients.parameters, *of_shares))
        shaped = (gradient.view(shape).to(dtype) for gradient, (shape, dtype) in zip(scaled, ctx.like, strict=True))
        return *shaped, *[None] * (9 - len(ctx.like))


class _Gradients:
    """Sums over chunks."""

    def __init__(self) -> None:
        self.readouts: list[Tensor] = []  # (C, n, R) of each chunk
        self.parameters: list[Tensor] = []  # (V, R), (V,)
        self.shares: list[Tensor] = []  # (C, n, ...) of each part of a chunk

    def add(self, readouts: Tensor, weight: Tensor, logits: Tensor, bias: Tensor) -> None:
        """(C, n, R), (V, R), gradient of the logits (C, n, V), of the bias (V,)."""
        flat = logits.flatten(0, 1)
        self.readouts.append(input_gradient(flat, weight).view(readouts.shape))
        parts = [weight_gradient(readouts.flatten(0, 1), flat).to(bias.dtype), bias]
        if self.parameters:
            torch._foreach_add_(self.parameters, parts)
        else:
            self.parameters = parts


@torch.no_grad()
def most_probable(readouts: Tensor, weight: Tensor, bias: Tensor, banned: Tensor) -> Tensor:
    """(N, R), (V, R), (V,), int64 ids -> int64 (N,), the ids with the greatest logits that are not banned."""
    operands = (in_autocast_dtype(tensor) for tensor in (readouts[None], weight, bias))
    chunks = (logits[0].index_fill_(1, banned, -torch.inf).argmax(-1) for _, logits in _logit_chunks(*operands))
    return torch.cat(list(chunks)) if len(readouts) else banned.new_empty(0)


def _logit_chunks(readouts: Tensor, weight: Tensor, bias: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(C, N, R), (V, R), (V,) -> positions n of N and their logits (C, n, V), which the caller may overwrite."""
    C, N, _ = readouts.shape
    for rows in slices(N, C * len(weight), CHUNK_NUMBERS):
        yield rows, matmul(readouts[:, rows].flatten(0, 1), weight, bias).view(C, -1, len(weight))


def slices(rows: int, columns: int, numbers: int) -> Iterator[slice]:
    """Rows of a (rows, columns) matrix, at most `numbers` numbers at a time but at least one row."""
    size = max(1, numbers // columns)
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


class _CrossEntropy(torch.autograd.Function):
    """Differentiated by hand: the plain cross-entropy is in every update, and autograd takes up to 1.4 times as
    long."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        probs = logits.softmax(-1)
        # The most probable token has a probability of at least 1 / V: the logarithm of the sum loses no precision.
        log_sum = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log_()
        log_prob = logits.gather(-1, targets[..., None]) - log_sum
        mean = logits.mean(-1, keepdim=True) - log_sum
        ctx.save_for_backward(probs, targets)
        ctx.smoothing = smoothing
        ctx.mark_non_differentiable(log_prob)
        return -((1 - smoothing) * log_prob + smoothing * mean)[..., 0], log_prob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        probs, targets = ctx.saved_tensors
        factor = factor[..., None]
        gradient = probs * factor
        gradient.scatter_add_(-1, targets[..., None], factor * (ctx.smoothing - 1))
        return gradient.sub_(factor * (ctx.smoothing / probs.shape[-1])) if ctx.smoothing else gradient, None, None


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(..., V), int64 (...) -> label-smoothed cross-entropy (...), differentiable, and the targets' negative
    log-likelihood (...), which is not; in nats.

    -(1 - smoothing) log p_target - smoothing mean(log p)   (Szegedy et al. 2016, section 7).
    """
    smoothed, log_prob = _CrossEntropy.apply(logits, targets, smoothing)  # type: ignore[no-untyped-call]
    return smoothed, -log_prob[..., 0]
