"""Losses of the output layer, computed chunk by chunk, so that few logits exist at once. The distribution
may be a mixture: of several readouts of a position, or of the output layer's prediction and copied tokens.

A chunk is the target positions of one matrix product; a criterion gets a part of it at a time. A criterion is a plain,
differentiable function of logits. Autograd differentiates it already in the forward pass, while the part is in the
cache; then the gradient overwrites the logits.

The mixture weights are called `shares`. On a CPU, readouts whose share is 0 are left out. On a GPU, finding them would
make the CPU wait, so all readouts are computed.

Shapes: C passes over a batch, N target positions, n of them in a chunk or a part, m rows of logits for these n (one for
each readout that is not left out), K readouts of a position, S source positions, R size of a readout, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nmt.ops.products import (
    Weight,
    in_autocast_dtype,
    input_gradient,
    linear,
    matmul,
    weight_gradient,
    wide,
    wide_dtype,
)

Criterion = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Computes the loss to minimise (n,) and named terms to report (n,), from the logits (C, n, V) of n positions and any
number of further tensors (n, ...). The logits are float32 or wider."""


class ChunkSizes(NamedTuple):
    """How many logits may exist at a time."""

    product: int = 2**24  # logits of a chunk, which is one matrix product: 64 MiB in float32
    cpu: int = 2**19  # logits of a part on a CPU: 2 MiB in float32, which stay in its cache
    gpu: int = 2**22  # logits of a part on any other device


SIZES = ChunkSizes()


class OutputLoss(NamedTuple):
    """The result of a criterion at all positions, in nats unless the criterion has another unit."""

    total: Tensor  # () sum of the criterion's loss over the counted positions; can go backward only once
    # value of each term to report, in the shape of `counted`, 0 at positions that do not count; without gradients
    terms: dict[str, Tensor]


def output_loss(
    readouts: Tensor,
    weight: Tensor,
    bias: Tensor,
    counted: Tensor,
    criterion: Criterion,
    *by_position: Tensor,
    shares: Tensor | None = None,
    layout: "type[OneReadout] | None" = None,
    sizes: ChunkSizes = SIZES,
) -> OutputLoss:
    """Compute the criterion of the logits W r + b: readouts r (C, N, R), W (V, R), b (V,) -> OutputLoss.

    counted: bool, N elements of any shape, the positions that count. by_position: tensors (N, ...); the criterion gets
    their rows after the logits. shares: None or (C, N, ...); the criterion gets the rows of `shares` between the logits
    and the rows of `by_position`. Gradients go to readouts, weight, bias and shares.

    layout: SeveralReadouts if a position has K readouts (C, N, K, R) with mixture weights `shares` (C, N, K). Then the
    criterion must come from `of_mixture`, which mixes probabilities, or from `mean_over_mixture`, which mixes losses.
    """
    terms: dict[str, Tensor] = {}
    rows, differentiate = layout or OneReadout, torch.is_grad_enabled()
    total: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        readouts, weight, bias, shares, rows, counted, criterion, by_position, sizes, terms, differentiate
    )
    return OutputLoss(total, terms)


class OneReadout:
    """Assigns the rows of a chunk's matrix product to target positions, each of which has one readout in each pass:
    readouts (C, N, R), shares (C, N, ...) or None."""

    def __init__(self, readouts: Tensor, shares: Tensor | None, counted: Tensor, differentiate: bool) -> None:
        self.readouts, self.shares, self.counted = readouts, shares, counted
        self.mixing: tuple[Mixing, ...] = ()  # what the criterion of a part gets after its leaves
        self.per_position = len(readouts)  # number of rows for each position: C
        inputs = (readouts, shares) if differentiate else ()
        self.gradients = tuple(torch.empty_like(tensor) for tensor in inputs if tensor is not None)
        self.dtype = wide_dtype(readouts.dtype)

    def read(self, chunk: slice) -> Tensor:
        """Return the readouts (m, R) of a chunk, to which the following calls refer."""
        self.chunk = chunk
        return self.readouts[:, chunk].flatten(0, 1)

    def leaves(self, logits: Tensor, part: slice) -> tuple[Tensor, ...]:
        """Return the tensors with respect to which the criterion of a part is differentiated: the part's logits, taken
        from the logits (m, V) of the chunk, and the part's shares, if there are any."""
        wide = logits.view(self.per_position, -1, logits.shape[-1])[:, part].to(self.dtype)
        return (wide,) if self.shares is None else (wide, self.shares[:, self._positions(part)])

    def store(self, logits: Tensor, part: slice, gradients: tuple[Tensor, ...]) -> None:
        """Overwrite the logits of a part by their gradient, and store the gradient of its shares."""
        logits.view(self.per_position, -1, logits.shape[-1])[:, part] = gradients[0]
        if self.shares is not None:
            self.gradients[1][:, self._positions(part)] = gradients[1]

    def finish(self, gradient: Tensor) -> None:
        """Store the gradient (m, R) of the chunk's readouts."""
        self.gradients[0][:, self.chunk] = gradient.view(self.per_position, -1, gradient.shape[-1])

    def _positions(self, part: slice) -> slice:
        """Return the positions of a part of the chunk among all N."""
        return slice(self.chunk.start + part.start, self.chunk.start + part.stop)


class _ChunkedLoss(torch.autograd.Function):
    """Computes loss and gradients chunk by chunk in the forward pass. The backward pass only scales the gradients."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        shares: Tensor | None,
        layout: type[OneReadout],
        counted: Tensor,
        criterion: Criterion,
        by_position: tuple[Tensor, ...],
        sizes: ChunkSizes,
        terms: dict[str, Tensor],
        differentiate: bool,
    ) -> Tensor:
        """Return the sum of the loss over the counted positions. Most arguments are those of `output_loss`.

        terms: an empty dictionary, which gets the terms to report, because a Function can return only tensors;
        differentiate: does the caller compute gradients? torch disables them here, so that it cannot tell.
        """
        inputs = (readouts, weight, bias) if shares is None else (readouts, weight, bias, shares)
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        dtype = wide_dtype(weight.dtype)
        factors = counted.flatten().to(dtype)
        total = factors.new_zeros(())
        reported: dict[str, list[Tensor]] = {}
        parameter_gradients: list[Tensor] = []  # gradients of weight and bias, empty before the first chunk
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        rows = layout(readouts, None if shares is None else shares.detach().to(dtype), counted.flatten(), differentiate)
        logits_per_position = rows.per_position * len(weight)
        for chunk in slices(len(factors), logits_per_position, sizes.product):
            chunk_readouts = rows.read(chunk)
            logits = matmul(chunk_readouts, weight, bias)
            bias_gradient = bias.new_zeros(bias.shape, dtype=dtype)
            part_size = sizes.cpu if weight.device.type == "cpu" else sizes.gpu
            for part in slices(chunk.stop - chunk.start, logits_per_position, part_size):
                positions = slice(chunk.start + part.start, chunk.start + part.stop)
                leaves = [leaf.detach().requires_grad_(differentiate) for leaf in rows.leaves(logits, part)]
                with torch.set_grad_enabled(differentiate):
                    others = [tensor[positions] for tensor in by_position]
                    loss, named = criterion(*leaves, *rows.mixing, *others)
                total += (loss.detach() * factors[positions]).sum()
                for name in named:
                    reported.setdefault(name, []).append(named[name].detach() * factors[positions])
                if differentiate:
                    gradients = torch.autograd.grad(loss, leaves, factors[positions])
                    bias_gradient += gradients[0].sum(tuple(range(gradients[0].dim() - 1)), dtype=dtype)
                    rows.store(logits, part, gradients)
                    del gradients
                del leaves, loss, named  # so that the numbers of two parts never exist at once
            if differentiate:
                rows.finish(input_gradient(logits, weight))
                new = [weight_gradient(chunk_readouts, logits).to(dtype), bias_gradient]
                if parameter_gradients:
                    torch._foreach_add_(parameter_gradients, new)
                else:
                    parameter_gradients = new
                del new
            del logits  # so that the logits of two chunks never exist at once
        terms.update({name: torch.cat(parts).view(counted.shape) for name, parts in reported.items()})
        ctx.gradients = (*rows.gradients[:1], *parameter_gradients, *rows.gradients[1:])
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


def slices(rows: int, columns: int, numbers: int) -> Iterator[slice]:
    """Yield slices of the rows of a matrix (rows, columns). A slice has at most `numbers` elements, but at least one
    row."""
    size = max(1, numbers // columns)
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


class _CrossEntropy(torch.autograd.Function):
    """Differentiates the cross-entropy by hand, because every update computes it, and autograd takes up to 1.4 times as
    long."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        probs = logits.softmax(-1)
        # log sum_v exp(logit_v) = max logit - log max p. As max p is at least 1 / V, its logarithm loses no precision.
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
    """Compute the label-smoothed cross-entropy, -(1 - smoothing) log p_target - smoothing mean(log p), and the negative
    log-likelihood -log p_target: logits (..., V), targets int64 (...) -> (...), (...)   (Szegedy et al. 2016, 7).

    Both are in nats. Only the cross-entropy is differentiable.
    """
    smoothed, log_prob = _CrossEntropy.apply(logits, targets, smoothing)  # type: ignore[no-untyped-call]
    return smoothed, -log_prob[..., 0]


def finite_log(probs: Tensor) -> Tensor:
    """Compute log p. Where p is 0, the result is the logarithm of the smallest normal number."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


class Mixing(NamedTuple):
    """Which readouts of a part are mixed. The readouts of one position and pass follow each other."""

    owners: Tensor  # (m,) int64: index of the mixture that each readout belongs to, pass * n + position
    size: int  # number of mixtures, C * n
    passes_and_readouts: tuple[int, int] | None  # (C, K) if no readout is left out: then m = n C K, in this order

    def sum(self, shares: Tensor, values: Tensor) -> Tensor:
        """Compute sum_k w_k v_k of each mixture: mixture weights w (m,), v (m, d) -> (C * n, d). The dtype stays, even
        under autocast."""
        with torch.autocast(values.device.type, enabled=False):
            if self.passes_and_readouts is None:
                matrix = shares.new_zeros(self.size, len(shares))
                return matrix.index_put((self.owners, torch.arange(len(shares))), shares) @ values
            C, K = self.passes_and_readouts
            sums = torch.bmm(shares.view(-1, 1, K), values.view(-1, K, values.shape[1]))
            return sums.view(-1, C, values.shape[1]).transpose(0, 1).flatten(0, 1)

    def groups(self, values: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Pair the values of readouts (m, d) with the sums (C * n, d) of their mixtures. The results are (n * C, K, d)
        and (n * C, 1, d), or if readouts are left out, both (m, 1, d)."""
        d = values.shape[1]
        if self.passes_and_readouts is None:
            return values[:, None], sums[self.owners, None]
        C, K = self.passes_and_readouts
        return values.view(-1, K, d), sums.view(C, -1, d).transpose(0, 1).reshape(-1, 1, d)


MixedCriterion = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Computes what a Criterion computes, but from the logits (m, V) of all readouts of n positions, their mixture weights
(m,), a Mixing, which says what they mix, and the further tensors (n, ...)."""


def of_mixture(criterion: Criterion) -> MixedCriterion:
    """Make a criterion of mixtures, which gives log sum_k w_k p_k to `criterion` as logits (already normalised), where
    p_k are the probabilities from readout k and w_k its mixture weight."""

    def mixed(logits: Tensor, shares: Tensor, mixing: Mixing, *others: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        probs: Tensor = _MeanOfSoftmax.apply(logits, shares, mixing)  # type: ignore[no-untyped-call]
        return criterion(finite_log(probs).view(-1, len(others[0]), logits.shape[-1]), *others)

    return mixed


def mean_over_mixture(criterion: Criterion) -> MixedCriterion:
    """Make a criterion of mixtures, which computes sum_k w_k criterion(logits_k). It takes a single pass (C = 1)."""

    def mean(logits: Tensor, shares: Tensor, mixing: Mixing, *others: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = criterion(wide(logits)[None], *(tensor[mixing.owners] for tensor in others))
        means = mixing.sum(shares, torch.stack([loss, *terms.values()], dim=1)).unbind(1)
        return means[0], dict(zip(terms, means[1:], strict=True))

    return mean


class _MeanOfSoftmax(torch.autograd.Function):
    """Computes sum_k w_k softmax(l_k): logits l (m, V), mixture weights w (m,) -> float32 or wider (C * n, V). Besides
    the logits and their gradient, it holds two tensors (m, V); autograd would hold four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shares: Tensor, mixing: Mixing) -> Tensor:  # noqa: ANN401
        probs = logits.softmax(-1, dtype=wide_dtype(logits.dtype))
        ctx.save_for_backward(probs, shares)
        ctx.mixing, ctx.dtype = mixing, logits.dtype
        return mixing.sum(shares, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        probs, shares = ctx.saved_tensors
        with torch.autocast(probs.device.type, enabled=False):
            grouped, slopes = ctx.mixing.groups(probs, grad)
            shares_grad = grouped @ slopes.transpose(1, 2)
            logits_grad = (slopes - shares_grad).mul_(grouped).mul_(shares.view(shares_grad.shape))
        return logits_grad.view(probs.shape).to(ctx.dtype), shares_grad.view(-1), None


class SeveralReadouts(OneReadout):
    """Assigns the rows of a chunk's matrix product to positions that have K readouts in each pass: readouts (C, N, K,
    R), mixture weights `shares` (C, N, K). The rows are ordered by position, then pass, then readout."""

    shares: Tensor

    def __init__(self, readouts: Tensor, shares: Tensor | None, counted: Tensor, differentiate: bool) -> None:
        assert shares is not None
        self.shares, self.counted = shares, counted
        self.readouts, self.flat_shares = readouts.reshape(-1, readouts.shape[-1]), shares.reshape(-1)
        C, _, K = shares.shape
        self.per_position = C * K
        self.complete = None if leaves_out(shares) else (C, K)
        inputs = (self.readouts, self.flat_shares) if differentiate else ()
        self.gradients = tuple(torch.zeros_like(tensor) for tensor in inputs)

    def read(self, chunk: slice) -> Tensor:
        C, N, K = self.shares.shape
        self.n = n = chunk.stop - chunk.start
        if self.complete is None:
            present = (self.shares[:, chunk] > 0) & self.counted[chunk, None]
            position, pass_index, component = present.transpose(0, 1).nonzero().unbind(1)
            ends = torch.bincount(position, minlength=n).cumsum(0).tolist()
        else:
            index = torch.arange(n * C * K, device=self.shares.device)
            position, pass_index, component = index // (C * K), index // K % C, index % K
            ends = list(range(C * K, n * C * K + 1, C * K))
        # Both (m,) int64: the index of each row's readout among all C * N * K, and the index of its mixture among the
        # C * n of the chunk.
        self.places = (pass_index * N + chunk.start + position) * K + component
        self.owners = pass_index * n + position
        self.ends = [0, *ends]  # position i of the chunk has the rows from ends[i] up to, not including, ends[i + 1]
        return self.readouts.index_select(0, self.places)

    def leaves(self, logits: Tensor, part: slice) -> tuple[Tensor, ...]:
        rows, size = self._rows(part), part.stop - part.start
        owners = self.owners[rows]
        owners = owners // self.n * size + owners % self.n - part.start
        self.mixing = (Mixing(owners, len(self.shares) * size, self.complete),)
        return logits[rows], self.flat_shares.index_select(0, self.places[rows])

    def store(self, logits: Tensor, part: slice, gradients: tuple[Tensor, ...]) -> None:
        rows = self._rows(part)
        logits[rows], of_shares = gradients
        places = self.places[rows]
        without_share = self.flat_shares.index_select(0, places) == 0
        self.gradients[1].index_copy_(0, places, of_shares.masked_fill_(without_share, 0.0))

    def finish(self, gradient: Tensor) -> None:
        self.gradients[0].index_copy_(0, self.places, gradient.to(self.readouts.dtype))

    def _rows(self, part: slice) -> slice:
        """Return the rows of the chunk that belong to the positions of a part."""
        return slice(self.ends[part.start], self.ends[part.stop])


def leaves_out(shares: Tensor) -> bool:
    """Check if readouts whose share is 0 are left out."""
    return shares.device.type == "cpu"


def mixture_log_probs(
    readouts: Tensor, weight: Weight, bias: Tensor, shares: Tensor, sizes: ChunkSizes = SIZES
) -> Tensor:
    """Compute log sum_k w_k p_k, where p_k are the probabilities from readout k: readouts (N, K, R), weight (V, R),
    bias (V,), shares w (N, K) -> float32 or wider (N, V). Where all w_k are 0, all tokens get the same number."""
    chunks = slices(len(readouts), readouts.shape[1] * len(bias), sizes.product)
    return torch.cat([finite_log(_mixed(readouts[chunk], weight, bias, shares[chunk])) for chunk in chunks])


def _mixed(readouts: Tensor, weight: Weight, bias: Tensor, shares: Tensor) -> Tensor:
    """Compute sum_k w_k p_k: (N, K, R), (V, R), (V,), (N, K) -> (N, V)."""
    if not leaves_out(shares):
        logits = linear(readouts, weight, bias)
        probs = logits.softmax(-1, dtype=wide_dtype(logits.dtype))
        with torch.autocast(probs.device.type, enabled=False):
            return torch.bmm(shares[:, None].to(probs.dtype), probs).squeeze(1)
    owners, components = shares.nonzero().unbind(1)
    logits = linear(readouts[owners, components], weight, bias)
    probs = logits.softmax(-1, dtype=wide_dtype(logits.dtype))
    probs = probs * shares[owners, components, None].to(probs.dtype)
    return probs.new_zeros(len(readouts), logits.shape[-1]).index_add(0, owners, probs)


def target_log_probs(
    readouts: Tensor, weight: Weight, bias: Tensor, shares: Tensor, targets: Tensor, sizes: ChunkSizes = SIZES
) -> Tensor:
    """Compute log p_k(target) of each readout k: readouts (N, K, R), weight (V, R), bias (V,), shares (N, K), targets
    int64 (N,) -> float32 or wider (N, K). It is 0 for readouts whose share is 0.

    The backward pass computes the logits again, because a loop would otherwise keep the logits of all its steps.
    """
    flat_shares = shares.flatten()
    places = flat_shares.nonzero()[:, 0] if leaves_out(shares) else torch.arange(len(flat_shares), device=shares.device)
    rows, targets = readouts.flatten(0, 1).index_select(0, places), targets[places // shares.shape[1]]
    if isinstance(weight, Tensor) and len(rows):
        log_probs: Tensor = _TargetLogProbs.apply(rows, weight, bias, targets, sizes)  # type: ignore[no-untyped-call]
    else:
        log_probs = _chosen(linear(rows, weight, bias), targets)[0]
    if not leaves_out(shares):
        return log_probs.masked_fill(flat_shares == 0, 0.0).view(shares.shape)
    return log_probs.new_zeros(shares.numel()).index_put((places,), log_probs).view(shares.shape)


class _TargetLogProbs(torch.autograd.Function):
    """Computes log p(target) from readouts (m, R), weight (V, R), bias (V,) and targets int64 (m,) -> (m,)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        readouts: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        sizes: ChunkSizes,
    ) -> Tensor:
        ctx.sizes = sizes
        ctx.dtypes = [tensor.dtype for tensor in (readouts, weight, bias)]
        readouts, weight, bias = (in_autocast_dtype(tensor) for tensor in (readouts, weight, bias))
        parts = [
            _chosen(matmul(readouts[chunk], weight, bias), targets[chunk])
            for chunk in slices(len(readouts), len(weight), sizes.product)
        ]
        log_probs, log_totals = (torch.cat(chunks) for chunks in zip(*parts, strict=True))
        ctx.save_for_backward(readouts, weight, bias, targets, log_totals)
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        readouts, weight, bias, targets, log_totals = ctx.saved_tensors
        # The sums over the chunks are wide: in bf16, each addition would round them.
        readouts_grad, weight_grad = [], torch.zeros_like(weight, dtype=grad.dtype)
        bias_grad = torch.zeros_like(bias, dtype=grad.dtype)
        for chunk in slices(len(readouts), len(weight), ctx.sizes.product):
            logits, slopes = matmul(readouts[chunk], weight, bias), grad[chunk, None]
            logits_grad = (logits.to(grad.dtype) - log_totals[chunk, None]).exp_().mul_(-slopes)
            logits_grad.scatter_add_(-1, targets[chunk, None], slopes)
            bias_grad += logits_grad.sum(0)
            logits_grad = logits_grad.to(logits.dtype)
            readouts_grad.append(input_gradient(logits_grad, weight))
            weight_grad += weight_gradient(readouts[chunk], logits_grad)
        gradients = torch.cat(readouts_grad), weight_grad, bias_grad
        return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None


def _chosen(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log p(target) and log sum_v exp(logit_v): logits (m, V), targets int64 (m,) -> (m,), (m,)."""
    log_totals = wide(logits).logsumexp(-1)
    return wide(logits.gather(-1, targets[:, None])[:, 0]) - log_totals, log_totals


def copied_log_probs(logits: Tensor, shares: Tensor, tokens: Tensor) -> Tensor:
    """Compute log(w_0 softmax(z)_v + sum of w_s over the source positions s with token v) for each token v   (See et
    al. 2017, eq. 9): logits z (..., V), shares w_0, w_1 ... w_S (..., 1 + S) that sum to 1, source tokens int64
    (..., S) -> float32 or wider (..., V)."""
    dtype = wide_dtype(logits.dtype)
    probs = logits.softmax(-1, dtype=dtype) * shares[..., :1]
    return finite_log(probs.scatter_add_(-1, tokens, shares[..., 1:].to(dtype)))


def with_copies(criterion: Criterion, source: Tensor) -> Criterion:
    """Make a criterion that mixes copies of the source tokens, int64 (B, S), into the probabilities, and gives their
    logarithms to `criterion` as logits. It takes logits (C, n, V), shares (C, n, 1 + S), the index of each position's
    sentence (n,), and then what `criterion` takes after its logits."""

    def mixed(logits: Tensor, shares: Tensor, sentences: Tensor, *others: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = source[sentences].expand(len(logits), -1, -1)
        return criterion(copied_log_probs(logits, shares, tokens), *others)

    return mixed
