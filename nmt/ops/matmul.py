"""Matrix products, in float32 too by the library that is fast on the processor at hand.

On a CPU torch leaves float32 products to MKL, which takes half the vector width on processors that are not Intel's, and
those in bfloat16 to oneDNN, which knows no such thing. Shapes: D operands side by side, N rows, I inputs, O outputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.machine import cpu_vendor

FEW = 4  # so many operands side by side are multiplied one by one
_onednn = None
if cpu_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def is_own(inputs: Tensor, weight: Tensor) -> bool:
    """Is `matmul` something else than torch's own product, which autograd knows nothing of?"""
    return (
        _onednn is not None
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.device.type == "cpu"
        and (weight.dim() == 2 or len(weight) <= FEW)  # noqa: PLR2004
        and inputs.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b, without gradient: (..., I), (O, I), (O,) -> (..., O) or (D, N, I), (D, O, I), (D, O) -> (D, N, O)."""
    if is_own(inputs, weight):
        if weight.dim() == 2:  # noqa: PLR2004
            return _product(inputs, weight, bias)
        biases = [None] * len(weight) if bias is None else bias.unbind(0)
        return torch.stack([_product(*each) for each in zip(inputs, weight, biases, strict=True)])
    if weight.dim() == 2:  # noqa: PLR2004
        return F.linear(inputs, weight, bias)
    return torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)


def weight_gradient(inputs: Tensor, grads: Tensor) -> Tensor:
    """dL/dW of x W': (..., N, I), (..., N, O) -> (..., O, I)."""
    if is_own(inputs, grads):  # oneDNN would copy its first operand, here the smaller one
        return matmul(inputs.mT, grads.mT).mT.contiguous()
    return grads.mT @ inputs


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _onednn is not None
    outputs: Tensor = _onednn(_dense(inputs), _dense(weight), bias, "none", [], "")
    return outputs


def _dense(matrix: Tensor) -> Tensor:
    """Part of a matrix would be taken by a method a thousand times as slow."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()
