"""Weights laid out in advance for a library's matrix product, for products without gradients.

oneDNN multiplies blocks of a weight matrix and otherwise rearranges the matrix at every call, which takes longer than
the product itself if there are few rows. Shapes: N rows, I inputs, O outputs.
"""

from typing import Protocol

import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.system.machine import cpu_capabilities

MIN_OUTPUTS = 64  # fewer are multiplied as they are
INT8_LEVELS = 127  # of either sign
ZERO = 128  # the unsigned input that stands for 0; oneDNN multiplies signed inputs quickly only on CPUs with AMX


class PackedWeight(Protocol):
    """x W' + b by a weight W that is stored in a library's own layout."""

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """(..., I), (O,) -> (..., O)."""
        ...


Weight = Tensor | PackedWeight


class Pack(Protocol):
    """How weights are packed."""

    def __call__(self, weight: Tensor, bounded: bool = False) -> Weight:
        """(O, I) -> a weight for products. bounded: all inputs lie between -1 and 1."""
        ...


def pack(weight: Tensor, bounded: bool = False) -> Weight:
    """(O, I) -> the weight packed in its own precision, or unchanged where that gains nothing."""
    if weight.device.type != "cpu" or len(weight) < MIN_OUTPUTS or weight.dtype not in _FloatWeight.dtypes():
        return weight
    return _FloatWeight(weight)


def pack_int8(weight: Tensor, bounded: bool = False) -> Weight:
    """(O, I) -> the weight in 8-bit integers, or unchanged if it is small. Raises UserError if the CPU has no such
    product."""
    check_int8()
    return weight if len(weight) < MIN_OUTPUTS else _Int8Weight(weight.float(), bounded)


def check_int8() -> None:
    """Raises UserError unless torch has 8-bit products on this CPU."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise") or not cpu_capabilities().get("avx2"):
        raise UserError("precision=int8 needs an x86 CPU with AVX2 and torch with oneDNN; use precision=auto")


class _FloatWeight:
    @staticmethod
    def dtypes() -> set[torch.dtype]:
        """The precisions in which oneDNN multiplies on this machine."""
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
            return set()
        return {torch.float32, torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else {torch.float32}

    def __init__(self, weight: Tensor) -> None:
        self.dtype = weight.dtype
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(self.dtype)
        inputs = inputs.to(self.dtype).contiguous()
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.packed, bias, "none", [], "")
        return outputs


class _Int8Weight:
    """Symmetric integers with a scale for each output, times inputs with a scale for each row, or with that of all
    inputs between -1 and 1.

    A row's result does not depend on the other rows, except for the rounding of the last bit. CPUs without VNNI add
    pairs of products in 16 bits: there, weights and inputs have 7 bits, so that no sum overflows.
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
        outputs: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(
                (rows.round_() + ZERO).to(torch.uint8),
                1 / self.levels,
                ZERO,
                self.packed,
                self.scales,
                self.zeros,
                bias,
            ),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return outputs
