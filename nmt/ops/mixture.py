"""Losses and probabilities of mixtures: each target position has several readouts, and a weight for each.

The logits of all readouts of all positions never exist at once. On a CPU, readouts without weight are left out; on a
GPU, finding them would make the CPU wait, so all are computed.

Shapes: C copies of a batch, N target positions, n of them in a chunk, K readouts of a position, m readouts with weight
in a chunk, R readout, V vocabulary.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.linear import linear
from nmt.ops.matmul import input_gradient, matmul, weight_gradient
from nmt.ops.mixing import CombineReadouts, Mixing
from nmt.ops.output_loss import CHUNK_NUMBERS, CPU_NUMBERS, GPU_NUMBERS, Criterion, OutputLoss, slices
from nmt.ops.packed import Weight
from nmt.ops.precision import finite_log, in_autocast_dtype, wide, wide_dtype


def mixture_loss(
    readouts: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixing: Tensor,
    counted: Tensor,
    combine: CombineReadouts,
    criterion: Criterion,
    *by_position: Tensor,
) -> OutputLoss:
    """(C, N, K, R), (V, R), (V,), weights (C, N, K), bool (N,), one or more (N, ...) -> OutputLoss.

    `combine` says what the weights average: probabilities or losses. Gradients go to readouts, weight, bias and mixing.
    """
    terms: dict[str, Tensor] = {}
    total: Tensor = _MixtureLoss.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, mixing, counted, combine, criterion, by_position, terms, torch.is_grad_enabled()
    )
    return OutputLoss(total, terms)


class _Rows(NamedTuple):
    """The readouts of some positions that are computed, ordered by position."""

    places: Tensor  # int64 (m,) among all C * N * K readouts
    owners: Tensor  # int64 (m,) copy * n + position
    ends: list[int]  # (n,) position i has the rows from ends[i - 1] to ends[i]


def _rows(mixing: Tensor, counted: Tensor, positions: slice) -> _Rows:
    C, N, K = mixing.shape
    n = positions.stop - positions.start
    if leaves_out(mixing):
        present = (mixing[:, positions] > 0) & counted[positions, None]
        position, copy, component = present.transpose(0, 1).nonzero().unbind(1)
        ends = torch.bincount(position, minlength=n).cumsum(0).tolist()
    else:
        index = torch.arange(n * C * K, device=mixing.device)
        position, copy, component = index // (C * K), index // K % C, index % K
        ends = list(range(C * K, n * C * K + 1, C * K))
    places = (copy * N + positions.start + position) * K + component
    return _Rows(places, copy * n + position, ends)


def leaves_out(mixing: Tensor) -> bool:
    """Are readouts without weight left out?"""
    return mixing.device.type == "cpu"


class _Gradients(NamedTuple):
    """Sums over chunks."""

    readouts: Tensor  # (C * N * K, R)
    weight: Tensor  # (V, R)
    bias: Tensor  # (V,)
    mixing: Tensor  # (C * N * K,)

    @classmethod
    def zeros(cls, readouts: Tensor, weight: Tensor, bias: Tensor, mixing: Tensor) -> Self:
        """Those of tensors like these, with the parameters' in the precision of `mixing`."""
        weight, bias = (torch.zeros_like(parameter, dtype=mixing.dtype) for parameter in (weight, bias))
        return cls(torch.zeros_like(readouts), weight, bias, torch.zeros_like(mixing))


class _MixtureLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        mixing: Tensor,
        counted: Tensor,
        combine: CombineReadouts,
        criterion: Criterion,
        by_position: tuple[Tensor, ...],
        terms: dict[str, Tensor],
        differentiate: bool,
    ) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in (readouts, weight, bias, mixing)]
        C, N, K, R = readouts.shape
        dtype = wide_dtype(weight.dtype)
        factors, mixing = counted.to(dtype), mixing.detach().to(dtype)
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        flat, flat_mixing = readouts.reshape(-1, R), mixing.reshape(-1)
        total, reported = factors.new_zeros(()), dict[str, list[Tensor]]()
        gradients = _Gradients.zeros(flat, weight, bias, flat_mixing) if differentiate else None
        numbers = CPU_NUMBERS if weight.device.type == "cpu" else GPU_NUMBERS
        columns, complete = C * K * len(weight), None if leaves_out(mixing) else (C, K)
        for chunk in slices(N, columns, CHUNK_NUMBERS):
            rows = _rows(mixing, counted, chunk)
            chunk_readouts = flat.index_select(0, rows.places)
            logits = matmul(chunk_readouts, weight, bias)
            n = chunk.stop - chunk.start
            for part in slices(n, columns, numbers):
                own = slice(rows.ends[part.start - 1] if part.start else 0, rows.ends[part.stop - 1])
                positions = slice(chunk.start + part.start, chunk.start + part.stop)
                shares = flat_mixing.index_select(0, rows.places[own])
                owners = rows.owners[own]
                size = part.stop - part.start
                weights = Mixing(shares, owners // n * size + owners % n - part.start, C * size, complete)
                others = tuple(tensor[positions] for tensor in by_position)
                loss, named, slopes = _evaluated(
                    combine, criterion, logits[own], weights, others, factors[positions] if differentiate else None
                )
                total += (loss * factors[positions]).sum()
                for name, term in named.items():
                    reported.setdefault(name, []).append(term * factors[positions])
                if gradients is not None:
                    logits_grad, shares_grad = slopes
                    gradients.bias.add_(logits_grad.sum(0, dtype=dtype))
                    gradients.mixing.index_copy_(0, rows.places[own], shares_grad.masked_fill_(shares == 0, 0.0))
                    logits[own] = logits_grad
            if gradients is not None:
                gradients.readouts.index_copy_(0, rows.places, input_gradient(logits, weight).to(flat.dtype))
                gradients.weight.add_(weight_gradient(chunk_readouts, logits))
            del logits  # so that two chunks' never exist at once
        terms.update({name: torch.cat(parts) for name, parts in reported.items()})
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.gradients is None:
            raise RuntimeError("the loss can go backward only once")  # the gradients are scaled in place, not copied
        gradients, ctx.gradients = ctx.gradients, None
        pairs = zip(gradients, ctx.like, strict=True)
        shaped = (gradient.mul_(factor).view(shape).to(dtype) for gradient, (shape, dtype) in pairs)
        return *shaped, None, None, None, None, None, None


def _evaluated(
    combine: CombineReadouts,
    criterion: Criterion,
    logits: Tensor,
    mixing: Mixing,
    by_position: tuple[Tensor, ...],
    factors: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
    """Logits (m, V) and the weights of n positions' readouts -> loss (n,), terms (n,), and with `factors` (n,) the
    gradients of the sum of losses times factors: of the logits (m, V), of the weights (m,)."""
    logits, shares = (tensor.detach().requires_grad_(factors is not None) for tensor in (logits, mixing.shares))
    with torch.set_grad_enabled(factors is not None):
        loss, terms = combine(criterion, logits, mixing._replace(shares=shares), by_position)
    gradients = () if factors is None else torch.autograd.grad(loss, (logits, shares), factors)
    return loss.detach(), {name: term.detach() for name, term in terms.items()}, gradients


def mixture_log_probs(readouts: Tensor, weight: Weight, bias: Tensor, mixing: Tensor) -> Tensor:
    """log sum_k w_k p_k: (N, K, R), (V, R), (V,), (N, K) -> float32 or wider (N, V); where no readout has weight, the
    same number for all tokens."""
    chunks = slices(len(readouts), readouts.shape[1] * len(bias), CHUNK_NUMBERS)
    return torch.cat([finite_log(_mixed(readouts[chunk], weight, bias, mixing[chunk])) for chunk in chunks])


def _mixed(readouts: Tensor, weight: Weight, bias: Tensor, mixing: Tensor) -> Tensor:
    """sum_k w_k p_k: (N, K, R), (V, R), (V,), (N, K) -> (N, V)."""
    if not leaves_out(mixing):
        logits = linear(readouts, weight, bias)
        probs = logits.softmax(-1, dtype=wide_dtype(logits.dtype))
        with torch.autocast(probs.device.type, enabled=False):
            return torch.bmm(mixing[:, None].to(probs.dtype), probs).squeeze(1)
    owners, components = mixing.nonzero().unbind(1)
    logits = linear(readouts[owners, components], weight, bias)
    probs = logits.softmax(-1, dtype=wide_dtype(logits.dtype))
    probs = probs * mixing[owners, components, None].to(probs.dtype)
    return probs.new_zeros(len(readouts), logits.shape[-1]).index_add(0, owners, probs)


def target_log_probs(readouts: Tensor, weight: Weight, bias: Tensor, mixing: Tensor, targets: Tensor) -> Tensor:
    """log p_k(target): (N, K, R), (V, R), (V,), (N, K), int64 (N,) -> float32 or wider (N, K), 0 for readouts without
    weight. Its backward pass computes the logits again, as a loop would otherwise keep those of all its steps."""
    weights = mixing.flatten()
    places = weights.nonzero()[:, 0] if leaves_out(mixing) else torch.arange(len(weights), device=mixing.device)
    rows, targets = readouts.flatten(0, 1).index_select(0, places), targets[places // mixing.shape[1]]
    if isinstance(weight, Tensor) and len(rows):
        log_probs: Tensor = _TargetLogProbs.apply(rows, weight, bias, targets)  # type: ignore[no-untyped-call]
    else:
        log_probs = _chosen(linear(rows, weight, bias), targets)[0]
    if not leaves_out(mixing):
        return log_probs.masked_fill(weights == 0, 0.0).view(mixing.shape)
    return log_probs.new_zeros(mixing.numel()).index_put((places,), log_probs).view(mixing.shape)


class _TargetLogProbs(torch.autograd.Function):
    """(m, R), (V, R), (V,), int64 (m,) -> (m,)."""

    @staticmethod
    def forward(ctx: Any, readouts: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:  # noqa: ANN401
        ctx.dtypes = [tensor.dtype for tensor in (readouts, weight, bias)]
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        parts = [
            _chosen(matmul(readouts[chunk], weight, bias), targets[chunk])
            for chunk in slices(len(readouts), len(weight), CHUNK_NUMBERS)
        ]
        log_probs, log_totals = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(readouts, weight, bias, targets, log_totals)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        readouts, weight, bias, targets, log_totals = ctx.saved_tensors
        readouts_grad, weight_grad = [], torch.zeros_like(weight)
        bias_grad = torch.zeros_like(bias, dtype=grad.dtype)
        for chunk in slices(len(readouts), len(weight), CHUNK_NUMBERS):
            logits, slopes = matmul(readouts[chunk], weight, bias), grad[chunk, None]
            logits_grad = (logits.to(grad.dtype) - log_totals[chunk, None]).exp_().mul_(-slopes)
            logits_grad.scatter_add_(-1, targets[chunk, None], slopes)
            bias_grad += logits_grad.sum(0)
            logits_grad = logits_grad.to(logits.dtype)
            readouts_grad.append(input_gradient(logits_grad, weight))
            weight_grad += weight_gradient(readouts[chunk], logits_grad)
        gradients = torch.cat(readouts_grad), weight_grad, bias_grad
        return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def _chosen(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(m, V), int64 (m,) -> log p(target), log sum exp logits (m,)."""
    log_totals = wide(logits).logsumexp(-1)
    return wide(logits.gather(-1, targets[:, None])[:, 0]) - log_totals, log_totals
