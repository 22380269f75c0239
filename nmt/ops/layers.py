"""Operations for loops over time steps: matrix products with deferred gradients, packed weights, rows, dropout.

In a loop of T steps, autograd would compute a gradient of a weight's size at every step and add them up: T small
products and T sums. Here the backward pass of each use only stores what the gradient needs (in `Shared.pending`). After
all uses, one function (a `CombineGradients`) computes the gradient; for a weight, this is a single product. Every use
has the `anchor` as an input, so autograd reaches the backward pass of the anchor last. That pass calls the function.

On a CPU, torch computes float32 products with MKL and bfloat16 products with oneDNN. On AMD processors, MKL uses only
half the vector width, so this module computes float32 products with oneDNN there.

Shapes: B batch, S source positions, D features (or operands, where several are multiplied side by side), N rows,
I inputs, O outputs, ... any batch axes. W' is the transpose of W.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nmt.config.errors import UserError
from nmt.system.machine import cpu_capabilities, cpu_vendor

PENDING_ELEMENTS = 2**24  # inputs and gradients with more elements than this are not kept, but reduced to a product
MAX_SEPARATE = 4  # up to this number of operands side by side, oneDNN computes their products one by one
# For a weight with fewer elements, oneDNN costs more than it saves: a call, and a kernel for each new number of rows.
MIN_WEIGHT = 2**14
_onednn = None
if cpu_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
MIN_OUTPUTS = 64  # a weight with fewer outputs is not packed
INT8_LEVELS = 127  # 8-bit integers lie between -127 and 127
ZERO = 128  # stands for 0 in unsigned inputs; oneDNN multiplies signed inputs quickly only on CPUs with AMX
MASK_BITS = 16  # random bits per element of a dropout mask, with which a probability is exact to 2^-17

Tree = TypeVar("Tree")


def in_autocast_dtype(tensor: Tensor) -> Tensor:
    """Convert a tensor to the dtype in which autocast computes matrix products; without autocast, keep its dtype."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums, exponentials and logarithms: float32, or `dtype` if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is wider."""
    return tensor.to(wide_dtype(tensor.dtype))


class Deferred(list[Any]):
    """What the uses of shared tensors store during one backward pass; empty at other times."""

    _pass = -1  # number of the backward pass that has stored something

    def begin(self) -> None:
        """Discard what an earlier backward pass has stored: torch.autograd.grad may reach uses without their source."""
        if (current := torch._C._current_graph_task_id()) != self._pass:
            self._pass = current
            self.clear()


CombineGradients = Callable[[Deferred], tuple[Tensor | None, ...]]
"""Computes the gradient of each shared tensor from `Shared.pending`, which holds what the uses have stored during the
backward pass. None stands for no gradient."""


class Shared(NamedTuple):
    """Tensors that several uses share, and what these uses need to defer the gradient."""

    values: tuple[Tensor | None, ...]  # the tensors, detached and converted to the dtype of the computation
    anchor: Tensor  # (1,) an input of every use, so that its backward pass follows those of all uses
    pending: Deferred


_loop: ContextVar[dict[Any, tuple[list[Any], Shared]] | None] = ContextVar("loop", default=None)


@contextmanager
def loop() -> Iterator[None]:
    """Enter a context in which `defer_gradient` recognises the tensors of earlier calls.

    It also keeps their converted forms, so a search uses the context as well, without gradients. A loop inside another
    loop is part of the outer loop.
    """
    if _loop.get() is not None:
        yield
        return
    shared: dict[Any, tuple[list[Any], Shared]] = {}
    reset = _loop.set(shared)
    try:
        yield
    finally:
        _loop.reset(reset)
        shared.clear()  # otherwise its weak references, whose callbacks refer to `shared`, form a cycle with it


def in_loop() -> bool:
    """Check if the gradients of products are deferred."""
    return torch.is_grad_enabled() and _loop.get() is not None


def _in_autocast_dtypes(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if tensor is None else in_autocast_dtype(tensor) for tensor in tensors)


def defer_gradient(
    tensors: tuple[Tensor | None, ...],
    combine: CombineGradients,
    convert: Callable[..., tuple[Tensor | None, ...]] = _in_autocast_dtypes,
) -> Shared:
    """Prepare tensors whose gradients `combine` computes after all uses. Within a loop, the same tensors and `combine`
    always give the same Shared.

    convert: computes `Shared.values` from the detached tensors, once.
    """
    shared = _loop.get()
    if shared is None:
        return _share(tensors, combine, convert)
    key = (*map(id, tensors), combine)
    if key not in shared:

        def remove(_: Any) -> None:  # noqa: ANN401
            shared.pop(key, None)  # because a new tensor may get the id of a deleted one

        shared[key] = (
            [weakref.ref(tensor, remove) for tensor in tensors if tensor is not None],
            _share(tensors, combine, convert),
        )
    return shared[key][1]


def _share(
    tensors: tuple[Tensor | None, ...], combine: CombineGradients, convert: Callable[..., tuple[Tensor | None, ...]]
) -> Shared:
    pending = Deferred()
    values = convert(*(None if tensor is None else tensor.detach() for tensor in tensors))
    return Shared(values, _Source.apply(combine, pending, *tensors), pending)  # type: ignore[no-untyped-call]


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, combine: CombineGradients, pending: Deferred, *tensors: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.combine, ctx.pending = combine, pending
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        first = tensors[0]
        assert first is not None
        return first.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradients = ctx.combine(ctx.pending)
        ctx.pending.clear()
        typed = zip(gradients, ctx.dtypes, strict=True)
        return (
            None,
            None,
            *(None if dtype is None or gradient is None else gradient.to(dtype) for gradient, dtype in typed),
        )


class FloatWeight:
    """A weight packed in the blocks that oneDNN multiplies. Otherwise oneDNN rearranges the weight at every call, which
    takes longer than the product itself if there are few rows."""

    @staticmethod
    def dtypes() -> set[torch.dtype]:
        """Return the precisions in which oneDNN multiplies on this machine."""
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
            return set()
        return {torch.float32, torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else {torch.float32}

    def __init__(self, weight: Tensor) -> None:
        self.dtype = weight.dtype
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W' + b without gradients: inputs (..., I), bias (O,) -> (..., O)."""
        bias = None if bias is None else bias.to(self.dtype)
        inputs = inputs.to(self.dtype).contiguous()
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, bias, "none", [], "")
        return outputs


class Int8Weight:
    """A weight in 8-bit integers, with a scale for each output. `product` converts the inputs to 8-bit integers too,
    with a scale for each row, or if all inputs lie between -1 and 1 (`bounded`), with a fixed scale.

    Other rows change the result of a row at most in the rounding of the last bit. CPUs without VNNI add pairs of
    products in 16 bits: there, weights and inputs have 7 bits, so that no sum overflows.
    """

    def __init__(self, weight: Tensor, bounded: bool) -> None:
        self.bounded = bounded
        capabilities = cpu_capabilities()
        vnni = capabilities.get("avx512_vnni") or capabilities.get("avx_vnni")
        self.levels = INT8_LEVELS if vnni else INT8_LEVELS // 2
        self.scales = weight.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / self.levels
        integers = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.zeros = torch.zeros(len(weight), dtype=torch.int32)
        self.packed: Tensor = torch.ops.onednn.qlinear_prepack(integers, None)

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W' + b without gradients: inputs (..., I), bias (O,) -> (..., O)."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self.bounded:
            outputs = self._product(rows * self.levels, bias)
        else:
            largest = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30)
            outputs = self._product(rows * (self.levels / largest), None).mul_(largest)
            outputs = outputs if bias is None else outputs.add_(bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], -1)

    def _product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        integers = (rows.round_() + ZERO).to(torch.uint8)
        weight = self.packed, self.scales, self.zeros
        outputs: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(integers, 1 / self.levels, ZERO, *weight, bias),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return outputs


Weight = Tensor | FloatWeight | Int8Weight
Pack = Callable[..., Weight]
"""Converts a weight (O, I) to the form in which `linear` multiplies with it, as `pack` and `pack_int8` do. A second
argument, `bounded`, says whether all inputs of the products lie between -1 and 1."""


def pack(weight: Tensor, bounded: bool = False) -> Weight:
    """Pack a weight (O, I) in its own dtype, or return it unchanged where packing gains nothing."""
    if weight.device.type != "cpu" or len(weight) < MIN_OUTPUTS or weight.dtype not in FloatWeight.dtypes():
        return weight
    return FloatWeight(weight)


def pack_int8(weight: Tensor, bounded: bool = False) -> Weight:
    """Pack a weight (O, I) in 8-bit integers, or return it unchanged if it has few outputs. Raises UserError unless
    torch has 8-bit products on this CPU."""
    check_int8()
    return weight if len(weight) < MIN_OUTPUTS else Int8Weight(weight.float(), bounded)


def check_int8() -> None:
    """Raise UserError unless torch has 8-bit products on this CPU."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not cpu_capabilities().get("avx2"):
        raise UserError("precision=int8 needs an x86 CPU with AVX2 and torch with oneDNN; use precision=auto")


class Linear(nn.Linear):
    """nn.Linear, faster inside loops and on processors where torch's own products are slow."""

    packed: Weight | None = None  # replaces `weight` in a model prepared for search

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute x W' + b: (..., I) -> (..., O)."""
        return linear(inputs, self.weight if self.packed is None else self.packed, self.bias)


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b: (..., I), (O, I), (O,) -> (..., O), or with D operands side by side: (D, N, I), (D, O, I),
    (D, O) -> (D, N, O)."""
    if not isinstance(weight, Tensor):
        return weight.product(inputs, bias)
    if in_loop() or (torch.is_grad_enabled() and uses_onednn(inputs, weight)):
        shared = defer_gradient((weight, bias), _linear_gradients)
        applied: Tensor = _Linear.apply(inputs, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return matmul(inputs, weight, bias)


def product(inputs: Tensor, operand: Tensor) -> Tensor:
    """Compute x A for D operands A side by side: (D, N, I), (D, I, O) -> (D, N, O)."""
    if in_loop():
        shared = defer_gradient((operand,), _product_gradients)
        applied: Tensor = _Product.apply(inputs, shared.anchor, shared.pending, *shared.values)  # type: ignore[no-untyped-call]
        return applied
    return torch.bmm(inputs, operand)


def uses_onednn(inputs: Tensor, weight: Tensor) -> bool:
    """Check if `matmul` calls oneDNN's own function, which autograd cannot differentiate, for this product."""
    return (
        _onednn is not None
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.device.type == "cpu"
        and (weight.dim() == 2 or len(weight) <= MAX_SEPARATE)  # noqa: PLR2004
        and inputs.numel() > 0
        and weight.shape[-2] * weight.shape[-1] >= MIN_WEIGHT
        and not torch.is_autocast_enabled("cpu")
    )


def matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b for the shapes that `linear` takes, but without deferring gradients. The operands must not need
    gradients if `uses_onednn` is true.
    """
    if uses_onednn(inputs, weight):
        assert not (torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad))
        if weight.dim() == 2:  # noqa: PLR2004
            return _onednn_product(inputs, weight, bias)
        biases = [None] * len(weight) if bias is None else bias.unbind(0)
        return torch.stack([_onednn_product(*operands) for operands in zip(inputs, weight, biases, strict=True)])
    if weight.dim() == 2:  # noqa: PLR2004
        return F.linear(inputs, weight, bias)
    return torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)


def input_gradient(grads: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of x in x W' from the gradient of the product: (..., N, O), (..., O, I) -> (..., N, I)."""
    return matmul(grads, weight.mT) if uses_onednn(grads, weight) else grads @ weight


def weight_gradient(inputs: Tensor, grads: Tensor) -> Tensor:
    """Compute the gradient of W in x W' from the gradient of the product: (..., N, I), (..., N, O) -> (..., O, I)."""
    large = inputs.shape[-1] * grads.shape[-1] >= MIN_WEIGHT
    if large and uses_onednn(inputs, grads):  # oneDNN copies its first operand; `inputs` is usually the smaller one
        return matmul(inputs.mT, grads.mT).mT.contiguous()
    return grads.mT @ inputs


class _Products:
    """Collects the inputs (..., N, I) and gradients (..., N, O) of a weight's uses, and reduces them to products."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.elements = 0
        self.total: tuple[Tensor, Tensor] | None = None  # gradients of the weight and the bias, already reduced

    def add(self, inputs: Tensor, grads: Tensor) -> None:
        self.inputs.append(inputs)
        self.grads.append(grads)
        self.elements += inputs.numel() + grads.numel()
        if self.elements > PENDING_ELEMENTS:
            self.fold()

    def fold(self) -> tuple[Tensor, Tensor]:
        """Reduce all stored inputs and gradients by one product. Return the gradients of weight and bias so far."""
        if self.inputs:
            inputs, grads = _join(self.inputs), _join(self.grads)
            dtype = wide_dtype(grads.dtype)
            total = weight_gradient(inputs, grads), grads.sum(-2, dtype=dtype)
            if self.total is not None:
                total = self.total[0].to(dtype) + total[0], self.total[1] + total[1]
            self.inputs, self.grads, self.elements, self.total = [], [], 0, total
        assert self.total is not None
        return self.total


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _store(pending: Deferred, inputs: Tensor, grads: Tensor) -> None:
    pending.begin()
    if not pending:
        pending.append(_Products())
    pending[0].add(inputs, grads)


def _linear_gradients(pending: Deferred) -> tuple[Tensor, Tensor]:
    folded: tuple[Tensor, Tensor] = pending[0].fold()
    return folded


def _product_gradients(pending: Deferred) -> tuple[Tensor]:
    return (pending[0].fold()[0].mT,)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs: Tensor,
        anchor: Tensor,
        pending: Deferred,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.pending, ctx.dtype = pending, inputs.dtype
        inputs = inputs.to(weight.dtype)
        ctx.save_for_backward(inputs, weight)
        return matmul(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            rows = (inputs, grad) if weight.dim() > 2 else (inputs.flatten(0, -2), grad.flatten(0, -2))  # noqa: PLR2004
            _store(ctx.pending, *rows)
        return input_gradient(grad, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, anchor: Tensor, pending: Deferred, operand: Tensor) -> Tensor:  # noqa: ANN401
        ctx.pending, ctx.dtype = pending, inputs.dtype
        inputs = inputs.to(operand.dtype)
        ctx.save_for_backward(inputs, operand)
        return torch.bmm(inputs, operand)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, operand = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            _store(ctx.pending, inputs, grad)
        return (grad @ operand.mT).to(ctx.dtype) if ctx.needs_input_grad[0] else None, None, None, None


def _onednn_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _onednn is not None
    outputs: Tensor = _onednn(_dense(inputs), _dense(weight), bias, "none", [], "")
    return outputs


def _dense(matrix: Tensor) -> Tensor:
    """Make a matrix contiguous if it is a slice of another one, because oneDNN is a thousand times slower on slices."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply a function to every tensor in nested tuples and NamedTuples, and keep other values."""
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    return _rebuilt(tree, [map_tensors(function, part) for part in tree]) if isinstance(tree, tuple) else tree


def select(tree: Tree, index: Tensor) -> Tree:
    """From every tensor in nested tuples and NamedTuples, take the rows `index`, int64 (N,), which may repeat. A tuple
    with a method `select` selects its rows by that method."""
    if isinstance(tree, Tensor):
        return tree.index_select(0, index)  # type: ignore[return-value]
    if hasattr(tree, "select"):
        return tree.select(index)  # type: ignore[no-any-return]
    return _rebuilt(tree, [select(part, index) for part in tree]) if isinstance(tree, tuple) else tree


def join(trees: Sequence[Tree], dim: int) -> Tree:
    """Concatenate the corresponding tensors of tuples or NamedTuples of the same form, and keep None."""
    if isinstance(trees[0], Tensor):
        return torch.cat(trees, dim=dim)  # type: ignore[arg-type, return-value]
    if not isinstance(trees[0], tuple):
        return trees[0]
    return _rebuilt(trees[0], [join(parts, dim) for parts in zip(*trees, strict=True)])


def _rebuilt(tree: Tree, parts: list[Any]) -> Tree:
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)  # type: ignore[call-arg]


def rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather rows: (B, S, D), int64 (N,) -> (N, D). The index counts the B S rows of all sentences.

    Within a loop, all calls with the same tensor add their gradients to one buffer.
    """
    shared = defer_gradient((tensor,), _buffer, _as_is)
    read: Tensor = _Rows.apply(shared.anchor, shared.pending, index, *shared.values)  # type: ignore[no-untyped-call]
    return read


def _as_is(tensor: Tensor) -> tuple[Tensor]:
    return (tensor,)


def _buffer(pending: Deferred) -> tuple[Tensor]:
    return (pending[0],)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pending: Deferred, index: Tensor, tensor: Tensor) -> Tensor:  # noqa: ANN401
        ctx.pending, ctx.shape = pending, tensor.shape
        ctx.save_for_backward(index)
        return tensor.flatten(0, 1).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        grad = wide(grad)
        ctx.pending.begin()
        if not ctx.pending:
            ctx.pending.append(torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device))
        ctx.pending[0].flatten(0, 1).index_add_(0, index, grad)
        return None, None, None, None


def swap_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Reorder all rows: (N, D), int64 (N,) -> (N, D). The index must be its own inverse, index[index[n]] = n, because
    it also reorders the gradient."""
    swapped: Tensor = _Swap.apply(tensor, index)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(index)
        return tensor.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014) with a mask that is cheap on a CPU."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape."""
        return dropout(inputs, self.p, self.training)


def dropout(inputs: Tensor, p: float, training: bool) -> Tensor:
    """Set elements to zero with probability p, and divide the others by 1 - p. Uses torch's global generator.

    On a CPU, torch's own dropout draws one random number per element and is ten times slower.
    """
    if not training or p == 0:
        return inputs
    if p == 1 or inputs.device.type != "cpu":
        return F.dropout(inputs, p)
    words = torch.empty(-(-inputs.numel() // 4), dtype=torch.int64).random_(-(2**63), None)  # one for four elements
    bits = words.view(torch.int16)[: inputs.numel()].view(inputs.shape)
    # A share p of all int16 numbers lies below this limit. The minimum avoids overflow for p near 1.
    limit = min(round(p * (1 << MASK_BITS)), (1 << MASK_BITS) - 1) - (1 << MASK_BITS - 1)
    kept = bits >= limit
    dropped: Tensor = inputs * kept.to(inputs.dtype).mul_(1 / (1 - p))
    return dropped


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Enter a context in which the model is in evaluation mode, so without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
