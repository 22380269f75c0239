"""Weights packed for a search: in the blocks of oneDNN, or in 8-bit integers. They have no gradients.

Shapes: I inputs, O outputs, ... any batch axes. W' is the transpose of W.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.ops.products import Weight
from nmt.system.machine import cpu_capabilities

MIN_OUTPUTS = 64  # a weight with fewer outputs is not packed
INT8_LEVELS = 127  # 8-bit integers lie between -127 and 127
ZERO = 128  # stands for 0 in unsigned inputs; oneDNN multiplies signed inputs quickly only on CPUs with AMX


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
