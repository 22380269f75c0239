"""Matrix products by the faster library for the processor.

On a CPU, torch computes float32 products with MKL, which uses only half the vector width on AMD processors, and
bfloat16 products with oneDNN, which has no such limit. Here oneDNN computes both on AMD. Shapes: D operands side by
side, N rows, I inputs, O outputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.system.machine import cpu_vendor

MAX_SEPARATE = 4  # up to this number of operands, products are computed one by one
# Elements of a weight below which oneDNN costs more than it saves: a call, and a kernel for each new number of rows.
MIN_WEIGHT = 2**14
_onednn = None
if cpu_vendor() == "AuthenticAMD" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def uses_onednn(inputs: Tensor, weight: Tensor) -> bool:
    """Is the product computed by oneDNN's own function, which autograd cannot differentiate?"""
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
    """x W' + b: (..., I), (O, I), (O,) -> (..., O), or (D, N, I), (D, O, I), (D, O) -> (D, N, O).

    If `uses_onednn`, it must be called without gradients.
    """
    if uses_onednn(inputs, weight):
        assert not (torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad))
        if weight.dim() == 2:  # noqa: PLR2004
            return _product(inputs, weight, bias)
        biases = [None] * len(weight) if bias is None else bias.unbind(0)
        return torch.stack([_product(*each) for each in zip(inputs, weight, biases, strict=True)])
    if weight.dim() == 2:  # noqa: PLR2004
        return F.linear(inputs, weight, bias)
    return torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)


def input_gradient(grads: Tensor, weight: Tensor) -> Tensor:
    """dL/dx of x W': (..., N, O), (..., O, I) -> (..., N, I)."""
    return matmul(grads, weight.mT) if uses_onednn(grads, weight) else grads @ weight


def weight_gradient(inputs: Tensor, grads: Tensor) -> Tensor:
    """dL/dW of x W': (..., N, I), (..., N, O) -> (..., O, I)."""
    large = inputs.shape[-1] * grads.shape[-1] >= MIN_WEIGHT
    if large and uses_onednn(inputs, grads):  # oneDNN copies its first operand: make that the smaller one
        return matmul(inputs.mT, grads.mT).mT.contiguous()
    return grads.mT @ inputs


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert _onednn is not None
    outputs: Tensor = _onednn(_dense(inputs), _dense(weight), bias, "none", [], "")
    return outputs


def _dense(matrix: Tensor) -> Tensor:
    """oneDNN is a thousand times slower on a slice of a matrix: copy it."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()
