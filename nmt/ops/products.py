"""Matrix products: with gradients that wait for the end of the backward pass, or with weights packed for a search.

In a loop of T steps, autograd would compute a gradient of a weight's size at every step and add them up: T small
products and T sums. A loop therefore uses a weight that `defer` has returned. The backward pass of each use then only
stores what the gradient needs (in `Uses`). Autograd runs the backward pass of `defer` after those of all uses; it
computes the gradient, for a weight by a single product.

On a CPU, torch computes float32 products with MKL and bfloat16 products with oneDNN. On AMD processors, MKL uses only
half the vector width, so this module computes float32 products with oneDNN there. A search, which needs no gradients,
multiplies with weights packed in the blocks of oneDNN, or in 8-bit integers.

Shapes: B batch, S source positions, D features (or operands, where several are multiplied side by side), N rows,
I inputs, O outputs, ... any batch axes. W' is the transpose of W.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
MIN_OUTPUTS = 64  # a weight with fewer outputs is not packed
INT8_LEVELS = 127  # 8-bit integers lie between -127 and 127
ZERO = 128  # stands for 0 in unsigned inputs; oneDNN multiplies signed inputs quickly only on CPUs with AMX
_onednn = None
if cpu_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


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
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self.bounded:
            outputs = self._product(rows * self.levels, bias)
        else:
            largest = rows.abs().amax(1, keepdim=True).clamp_(min=1e-30)
            outputs = self._product(rows * (self.levels / largest), None).mul_(largest)
            outputs = outputs if bias is None else outputs.add_(bias)
        return outputs.to(inputs.dtype).view(*inputs.shape[:-1], -1)

    def _product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Round rows in place, which lie between -levels and levels, multiply them by weight and 1 / levels, and add
        the bias."""
        integers = (rows.round_() + ZERO).to(torch.uint8)
        weight = self.packed, self.scales, self.zeros
        outputs: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(integers, 1 / self.levels, ZERO, *weight, bias),
            *(1.0, 0, torch.float32, "none", [], ""),  # output scale 1, zero point 0, no operation afterwards
        )
        return outputs


Weight = Tensor | FloatWeight | Int8Weight
"""A weight (O, I) of a product: a tensor, or packed and then without gradients."""
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
    if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not cpu_capabilities().get("avx2"):
        raise UserError("precision=int8 needs an x86 CPU with AVX2 and torch with oneDNN; use precision=auto")
    return weight if len(weight) < MIN_OUTPUTS else Int8Weight(weight.float(), bounded)


class Sums(Protocol):
    """What the uses of deferred tensors have added up during a backward pass."""

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradient of each deferred tensor, None for a tensor without one."""
        ...


SumsT = TypeVar("SumsT", bound=Sums)


@dataclass
class Uses:
    """Holds what the uses of deferred tensors share: during a backward pass, their `Sums`."""

    converted: Any = None  # what the uses compute from the tensors once; at first None
    made: dict[type[Sums], Any] = field(default_factory=dict)  # the sums of each kind of use
    task: int = -1  # number of the backward pass that the sums belong to

    def sums(self, kind: type[SumsT], make: Callable[[], SumsT]) -> SumsT:
        """Return the sums of this kind; the first use makes them. Those of an earlier backward pass are discarded:
        torch.autograd.grad may reach uses without the tensors themselves."""
        if (current := torch._C._current_graph_task_id()) != self.task:
            self.made, self.task = {}, current
        if kind not in self.made:
            self.made[kind] = make()
        sums: SumsT = self.made[kind]
        return sums


def defer(*tensors: Weight | None, cast: bool = True) -> Any:  # noqa: ANN401
    """Return tensors of the same values, as a tuple. Uses of the first one by `linear`, `product`, `gather_rows` or
    `additive_energies` defer the gradients of all; other uses have their ordinary gradients.

    cast: convert the tensors to the dtype of products under autocast. Packed weights, which have no gradients, and None
    are returned as they are.
    """
    if not isinstance(tensors[0], Tensor):
        return tensors
    uses = Uses()
    deferred = _Defer.apply(uses, cast, *tensors)  # type: ignore[no-untyped-call]
    deferred[0].uses = uses
    return deferred


def uses_of(tensor: Tensor) -> Uses | None:
    """Return where the uses of a tensor store what its gradient needs; None if `defer` has not returned the tensor."""
    return getattr(tensor, "uses", None)


class _Defer(torch.autograd.Function):
    """Passes tensors on. Its backward pass, which runs after those of all uses, adds the gradients that they stored."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        uses: Uses,
        cast: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.uses = uses
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        values = [None if tensor is None else tensor.detach() for tensor in tensors]
        return tuple(in_autocast_dtype(value) if cast and value is not None else value for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        totals, uses = list(grads), ctx.uses
        made = uses.made.values() if uses.task == torch._C._current_graph_task_id() else ()
        uses.made = {}
        for sums in made:
            for number, (total, gradient) in enumerate(zip(totals, sums.gradients(), strict=False)):
                totals[number] = gradient if total is None else total if gradient is None else total + gradient
        typed = zip(totals, ctx.dtypes, strict=True)
        return None, None, *(None if total is None or dtype is None else total.to(dtype) for total, dtype in typed)


class Linear(nn.Linear):
    """nn.Linear, faster inside loops and on processors where torch's own products are slow."""

    # Weight and bias to multiply with in place of the parameters: deferred ones in a loop, packed ones in a search.
    operands: tuple[Weight, Tensor | None] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute x W' + b: (..., I) -> (..., O)."""
        return linear(inputs, *(self.operands or (self.weight, self.bias)))


@contextmanager
def deferring(*modules: nn.Module | None) -> Iterator[None]:
    """Enter a context in which all `Linear` layers of some modules defer the gradients of their parameters."""
    parts = [part for module in modules if module is not None for part in module.modules()]
    layers = [part for part in parts if isinstance(part, Linear) and part.operands is None]
    for layer in layers:
        layer.operands = defer(layer.weight, layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            layer.operands = None


def linear(inputs: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute x W' + b: (..., I), (O, I), (O,) -> (..., O), or with D operands side by side: (D, N, I), (D, O, I),
    (D, O) -> (D, N, O)."""
    if not isinstance(weight, Tensor):
        return weight.product(inputs, bias)
    if torch.is_grad_enabled():
        operands = weight, bias
        if uses_of(weight) is None and uses_onednn(inputs, weight):
            operands = defer(weight, bias)
        if (uses := uses_of(operands[0])) is not None:
            assert bias is None or operands[1].grad_fn is operands[0].grad_fn  # type: ignore[union-attr]  # deferred together
            applied: Tensor = _Product.apply(inputs, *operands, uses, False)  # type: ignore[no-untyped-call]
            return applied
    return matmul(inputs, weight, bias)


def product(inputs: Tensor, operand: Tensor) -> Tensor:
    """Compute x A for D operands A side by side: (D, N, I), (D, I, O) -> (D, N, O)."""
    uses = uses_of(operand)
    if uses is None or not torch.is_grad_enabled():
        return torch.bmm(inputs, operand)
    applied: Tensor = _Product.apply(inputs, operand, None, uses, True)  # type: ignore[no-untyped-call]
    return applied


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
    gradients if `uses_onednn` is true."""
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
    # The product is inputs' @ grads, so that `grads` is the operand which `uses_onednn` takes for a weight; the size of
    # the result decides too. oneDNN copies its first operand, and `inputs` is usually the smaller one.
    large = inputs.shape[-1] * grads.shape[-1] >= MIN_WEIGHT
    if large and uses_onednn(inputs, grads):
        return matmul(inputs.mT, grads.mT).mT.contiguous()
    return grads.mT @ inputs


@dataclass
class _Products:
    """Collects the inputs (..., N, I) and gradients (..., N, O) of a weight's uses, and reduces them to products."""

    inputs: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    elements: int = 0
    total: tuple[Tensor, Tensor] | None = None  # gradients of the weight and the bias, already reduced

    def add(self, inputs: Tensor, grads: Tensor) -> None:
        """Store the inputs and the gradient of one use. If many are stored, reduce them."""
        self.inputs.append(inputs)
        self.grads.append(grads)
        self.elements += inputs.numel() + grads.numel()
        if self.elements > PENDING_ELEMENTS:
            self.gradients()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Reduce all stored inputs and gradients by one product. Return the gradients of weight and bias so far."""
        if self.inputs:
            inputs, grads = self.inputs[0], self.grads[0]
            if len(self.inputs) > 1:
                inputs, grads = torch.cat(self.inputs, dim=-2), torch.cat(self.grads, dim=-2)
            dtype = wide_dtype(grads.dtype)
            total = weight_gradient(inputs, grads), grads.sum(-2, dtype=dtype)
            if self.total is not None:
                total = self.total[0].to(dtype) + total[0], self.total[1] + total[1]
            self.inputs, self.grads, self.elements, self.total = [], [], 0, total
        assert self.total is not None
        return self.total


class _Product(torch.autograd.Function):
    """Computes x W' + b, or if `plain` x A for operands A side by side, and stores in `uses` what the gradients of the
    operands need."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        uses: Uses,
        plain: bool,
    ) -> Tensor:
        ctx.uses, ctx.plain, ctx.dtype = uses, plain, inputs.dtype
        inputs = inputs.to(weight.dtype)
        ctx.save_for_backward(inputs, weight)
        return torch.bmm(inputs, weight) if plain else matmul(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        inputs, weight = ctx.saved_tensors
        grad, inputs_grad = grad.to(weight.dtype), None  # autocast gives the product of float32 operands another dtype
        if ctx.needs_input_grad[1]:
            pair = (inputs, grad) if weight.dim() > 2 else (inputs.flatten(0, -2), grad.flatten(0, -2))  # noqa: PLR2004
            ctx.uses.sums(_Products, _Products).add(
                *(reversed(pair) if ctx.plain else pair)
            )  # A is W': they swap roles
        if ctx.needs_input_grad[0]:
            inputs_grad = (grad @ weight.mT if ctx.plain else input_gradient(grad, weight)).to(ctx.dtype)
        return inputs_grad, None, None, None, None


@dataclass
class Buffer:
    """A sum of gradients of one tensor, which is multiplied by a factor at the end."""

    total: Tensor
    factor: Tensor | None = None

    def gradients(self) -> tuple[Tensor]:
        """Return the gradient."""
        return (self.total if self.factor is None else self.total.mul_(self.factor),)


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather rows: (B, S, D), int64 (N,) -> (N, D). The index counts the B S rows of all sentences. All calls with the
    same deferred tensor add their gradients to one buffer."""
    if not torch.is_grad_enabled():
        return tensor.flatten(0, 1).index_select(0, index)
    if (uses := uses_of(tensor)) is None:
        (tensor,) = defer(tensor, cast=False)
        uses = uses_of(tensor)
    gathered: Tensor = _GatheredRows.apply(tensor, index, uses)  # type: ignore[no-untyped-call]
    return gathered


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor, uses: Uses) -> Tensor:  # noqa: ANN401
        ctx.uses, ctx.shape = uses, tensor.shape
        ctx.save_for_backward(index)
        return tensor.flatten(0, 1).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        grad = wide(grad)
        buffer = ctx.uses.sums(Buffer, lambda: Buffer(grad.new_zeros(ctx.shape)))
        buffer.total.flatten(0, 1).index_add_(0, index, grad)
        return None, None, None


def _onednn_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W' + b by oneDNN's function for packed weights, which also takes plain ones."""
    assert _onednn is not None
    outputs: Tensor = _onednn(_dense(inputs), _dense(weight), bias, "none", [], "")
    return outputs


def _dense(matrix: Tensor) -> Tensor:
    """Make a matrix contiguous if it is a slice of another one, because oneDNN is a thousand times slower on slices."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()
