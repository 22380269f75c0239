"""Losses of the output layer, chunk by chunk: the logits of all positions never exist at once.

A criterion is a plain, differentiable function of a chunk of logits; autograd differentiates it. Its gradient is
computed in the forward pass, while the chunk is in the cache, and then overwrites the logits.

Shapes: C passes over a batch, N target positions, n of them in a chunk, m rows of a chunk, R readout, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.linear import input_gradient, matmul, weight_gradient
from nmt.ops.precision import in_autocast_dtype, wide_dtype

Criterion = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Logits (C, n, V) in float32 or wider, (n, ...) of other tensors -> loss to minimise (n,), terms to report (n,)."""


class ChunkSizes(NamedTuple):
    """How many logits exist at a time."""

    product: int = 2**24  # of one matrix product: 64 MiB in float32
    cpu: int = 2**19  # for a criterion on a CPU: 2 MiB in float32, which stay in its cache
    gpu: int = 2**22  # for a criterion elsewhere


SIZES = ChunkSizes()


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
    sizes: ChunkSizes = SIZES,
) -> OutputLoss:
    """The criterion of the logits W r + b: (C, N, R), (V, R), (V,), bool (N,), any number of (N, ...) -> OutputLoss.

    The criterion gets the same rows of every tensor in `by_position`, and of `shares` (C, N, ...), if given, before
    these. Gradients go to readouts, weight, bias and shares.
    """
    return chunked_loss(Rows, readouts, weight, bias, shares, counted, criterion, by_position, sizes)


def chunked_loss(
    rows: "type[Rows]",
    readouts: Tensor,
    weight: Tensor,
    bias: Tensor,
    shares: Tensor | None,
    counted: Tensor,
    criterion: Criterion,
    by_position: tuple[Tensor, ...],
    sizes: ChunkSizes,
) -> OutputLoss:
    """As `output_loss`, with the readouts and shares laid out as `rows` reads them."""
    terms: dict[str, Tensor] = {}
    total: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, shares, rows, counted, criterion, by_position, sizes, terms, torch.is_grad_enabled()
    )
    return OutputLoss(total, terms)


class Rows:
    """Which rows of a product belong to which positions: here each position of each pass has one readout (C, N, R),
    with shares (C, N, ...)."""

    def __init__(self, readouts: Tensor, shares: Tensor | None, counted: Tensor, differentiate: bool) -> None:
        self.readouts, self.shares, self.counted = readouts, shares, counted
        self.per_position = len(readouts)  # rows
        inputs = (readouts, shares) if differentiate else ()
        self.gradients = tuple(torch.empty_like(tensor) for tensor in inputs if tensor is not None)
        self.dtype = wide_dtype(readouts.dtype)

    def start(self, chunk: slice) -> Tensor:
        """The readouts (m, R) of a chunk of positions, to which later calls refer."""
        self.chunk = chunk
        return self.readouts[:, chunk].flatten(0, 1)

    def leaves(self, logits: Tensor, part: slice) -> tuple[Tensor, ...]:
        """Logits (m, V) of the chunk -> what the criterion differentiates for some positions of it: their logits and,
        if there are any, their shares."""
        wide = logits.view(self.per_position, -1, logits.shape[-1])[:, part].to(self.dtype)
        return (wide,) if self.shares is None else (wide, self.shares[:, self._positions(part)])

    def evaluate(
        self, criterion: Criterion, leaves: list[Tensor], part: slice, others: tuple[Tensor, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The criterion's loss (n,) and terms (n,) for these positions of the chunk."""
        return criterion(*leaves, *others)

    def store(self, logits: Tensor, part: slice, gradients: tuple[Tensor, ...]) -> None:
        """Overwrite the logits of these positions by their gradient, and store that of their shares."""
        logits.view(self.per_position, -1, logits.shape[-1])[:, part] = gradients[0]
        if self.shares is not None:
            self.gradients[1][:, self._positions(part)] = gradients[1]

    def finish(self, gradient: Tensor) -> None:
        """Store the gradient (m, R) of the chunk's readouts."""
        self.gradients[0][:, self.chunk] = gradient.view(self.per_position, -1, gradient.shape[-1])

    def _positions(self, part: slice) -> slice:
        return slice(self.chunk.start + part.start, self.chunk.start + part.stop)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        shares: Tensor | None,
        layout: type[Rows],
        counted: Tensor,
        criterion: Criterion,
        by_position: tuple[Tensor, ...],
        sizes: ChunkSizes,
        terms: dict[str, Tensor],
        differentiate: bool,
    ) -> Tensor:
        inputs = (readouts, weight, bias) if shares is None else (readouts, weight, bias, shares)
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        dtype = wide_dtype(weight.dtype)
        factors = counted.to(dtype)
        total = factors.new_zeros(())
        reported: dict[str, list[Tensor]] = {}
        parameters: list[Tensor] = []  # gradients of weight and bias
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        rows = layout(readouts, None if shares is None else shares.detach().to(dtype), counted, differentiate)
        columns = rows.per_position * len(weight)
        for chunk in slices(len(counted), columns, sizes.product):
            chunk_readouts = rows.start(chunk)
            logits = matmul(chunk_readouts, weight, bias)
            bias_gradient = bias.new_zeros(bias.shape, dtype=dtype)
            numbers = sizes.cpu if weight.device.type == "cpu" else sizes.gpu
            for part in slices(chunk.stop - chunk.start, columns, numbers):
                positions = slice(chunk.start + part.start, chunk.start + part.stop)
                leaves = [leaf.detach().requires_grad_(differentiate) for leaf in rows.leaves(logits, part)]
                with torch.set_grad_enabled(differentiate):
                    others = tuple(tensor[positions] for tensor in by_position)
                    loss, named = rows.evaluate(criterion, leaves, part, others)
                total += (loss.detach() * factors[positions]).sum()
                for name, term in named.items():
                    reported.setdefault(name, []).append(term.detach() * factors[positions])
                if differentiate:
                    gradients = torch.autograd.grad(loss, leaves, factors[positions])
                    bias_gradient += gradients[0].sum(tuple(range(gradients[0].dim() - 1)), dtype=dtype)
                    rows.store(logits, part, gradients)
            if differentiate:
                rows.finish(input_gradient(logits, weight))
                new = [weight_gradient(chunk_readouts, logits).to(dtype), bias_gradient]
                if parameters:
                    torch._foreach_add_(parameters, new)
                else:
                    parameters = new
            del logits  # so that two chunks' never exist at once
        terms.update({name: torch.cat(parts) for name, parts in reported.items()})
        ctx.gradients = (*rows.gradients[:1], *parameters, *rows.gradients[1:])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.gradients is None:
            raise RuntimeError("the loss can go backward only once")  # the gradients are scaled in place, not copied
        gradients, ctx.gradients = ctx.gradients, None
        pairs = zip(gradients, ctx.like, strict=True)
        shaped = (gradient.mul_(factor).view(shape).to(dtype) for gradient, (shape, dtype) in pairs)
        return *shaped, *[None] * (11 - len(ctx.like))


@torch.no_grad()
def most_probable(readouts: Tensor, weight: Tensor, bias: Tensor, banned: Tensor, sizes: ChunkSizes = SIZES) -> Tensor:
    """(N, R), (V, R), (V,), int64 ids -> int64 (N,), the ids with the greatest logits that are not banned."""
    readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
    tokens = banned.new_empty(len(readouts))
    for chunk in slices(len(readouts), len(weight), sizes.product):
        tokens[chunk] = matmul(readouts[chunk], weight, bias).index_fill_(1, banned, -torch.inf).argmax(-1)
    return tokens


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
