"""The precision in which parts of a computation run."""

import torch
from torch import Tensor


def in_autocast_dtype(tensor: Tensor) -> Tensor:
    """Convert a tensor to the precision of matrix products."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums, exponentials and logarithms: float32, or a wider one as it is."""
    return torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is wider."""
    return tensor.to(wide_dtype(tensor.dtype))


def finite_log(probs: Tensor) -> Tensor:
    """Compute log p; where p is 0, the logarithm of the smallest normal number."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
