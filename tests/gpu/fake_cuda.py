"""CUDA tensors without data, for machines without a GPU: they have shapes, types and devices, but compute nothing.

Tensors on the CPU stay real. A copy from the device holds zeros, unless its tensor is an unchanged copy of one on the
host. The kernels, and the places in the program that wait for the device, are recorded. This needs a separate process
that preloads the library built from fake_cuda.cpp.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from nmt.model import recurrent

CUDA = torch.device("cuda")
PACKAGE = Path(recurrent.__file__).parents[1]
aten = torch.ops.aten
# Operations whose number of results depends on values: the host waits for this number.
SIZES = {aten.nonzero.default, aten._unique2.default, aten.bincount.default, aten.masked_select.default}
NO_KERNEL = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


class FakeCUDA(TorchDispatchMode):
    """Runs without data the operations that read or make a CUDA tensor, and all others as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()  # number of waits by place in the package
        self.transfers: Counter[str] = Counter()  # copies between host and device by place
        self.copies: list[tuple[Tensor, Tensor]] = []  # (tensor on the device, tensor on the host it was copied from)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        on_device = any(isinstance(each, FakeTensor) for each in tensors)
        named = kwargs.get("device")
        to_device = on_device if named is None else torch.device(named).type == "cuda"
        if func in (aten._local_scalar_dense.default, aten.equal.default) and on_device:
            self._wait(f"{func.overloadpacket.__name__}")
            return True if func is aten.equal.default or tensors[0].dtype == torch.bool else 1
        if func is aten._to_copy.default and on_device != to_device:
            return self._copy(func, tensors[0], to_device, kwargs)
        if not on_device and not to_device:
            return func(*args, **kwargs)
        if func in SIZES or (func is aten.index.Tensor and any(each.dtype == torch.bool for each in tensors[1:])):
            self._wait(func.overloadpacket.__name__)
            raise AssertionError(f"{func}: its size depends on values on the device ({_place()})")
        if func.namespace == "aten" and not _is_view(func) and func.overloadpacket.__name__ not in NO_KERNEL:
            self.kernels[func.overloadpacket.__name__] += 1
        # A tensor without dimensions may stay on the CPU.
        args, kwargs = tree_map(self._number, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)

    def _number(self, value: object) -> object:
        real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self.fake.from_tensor(value) if real and value.dim() == 0 else value

    def _copy(self, func: Any, tensor: Tensor, to_device: bool, kwargs: dict[str, Any]) -> Tensor:  # noqa: ANN401
        self.transfers[_place()] += 1
        if not kwargs.get("non_blocking"):
            self._wait("copy to the device" if to_device else "copy to the host")
        if to_device:
            fake = self.fake.from_tensor(tensor)
            with self.fake:
                copied: Tensor = func(fake, **kwargs)
            self.copies.append((copied, tensor))
            return copied
        known = next((host for copied, host in self.copies if copied is tensor), None)
        return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype) if known is None else known

    def _wait(self, what: str) -> None:
        self.waits[f"{_place()}: {what}"] += 1


def _place() -> str:
    """Return the file and function of the innermost frame within the package."""
    for frame in reversed(traceback.extract_stack()):
        if Path(frame.filename).is_relative_to(PACKAGE):
            return f"{Path(frame.filename).relative_to(PACKAGE)}, {frame.name}"
    return "backward"


def _is_view(func: Any) -> bool:  # noqa: ANN401
    returned = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def on_cuda(module: nn.Module, mode: FakeCUDA) -> nn.Module:
    """Move a module's parameters and buffers to the device; shared ones stay shared."""
    moved: dict[Tensor, Tensor] = {}
    for each in module.modules():
        for parts, wrap in ((each._parameters, nn.Parameter), (each._buffers, lambda tensor: tensor)):
            for name, tensor in parts.items():
                if tensor is None:
                    continue
                if tensor not in moved:
                    moved[tensor] = wrap(mode.fake.from_tensor(tensor.detach()).to(CUDA))
                parts[name] = moved[tensor]
    return module


def replace_libraries(replace: Callable[[object, str, object], None]) -> None:
    """Replace what needs a GPU's libraries by functions with the same shapes, types and devices."""
    replace(recurrent, "_run_torch", _run_torch)
    replace(Tensor, "pin_memory", lambda tensor: tensor)
    torch._C._set_only_lift_cpu_tensors(True)  # so that the mode sees copies by torch.tensor(..., device="cuda")
    replace(torch.cuda, "_lazy_init", lambda: None)
    replace(torch.cuda, "is_available", lambda: True)
    replace(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    replace(torch.cuda, "empty_cache", lambda: None)
    kernels = torch.library.Library("aten", "IMPL", "Meta")
    kernels.impl("_thnn_fused_gru_cell", _gru_cell)
    kernels.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward)
    kernels.impl("_thnn_fused_lstm_cell", _lstm_cell)
    kernels.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward)
    replace(recurrent, "kernels", kernels)  # keeps the kernels registered


def _run_torch(rnn: Any, inputs: Tensor, lengths: Tensor | None, initial: Any) -> Any:  # noqa: ANN401
    """Stand in for cuDNN: return tensors of the right shapes that depend on inputs, initial state and parameters."""
    assert lengths is None or (lengths.device.type == "cpu" and not isinstance(lengths, FakeTensor))
    D, H = 2 if rnn.bidirectional else 1, rnn.hidden_size
    total = inputs.sum(-1, keepdim=True) + sum(parameter.sum().to(inputs.dtype) for parameter in rnn.parameters())
    outputs = total.expand(-1, -1, D * H).contiguous()
    if initial is not None:
        outputs = outputs + sum(part.sum() for state in initial for part in state).to(inputs.dtype)
    last = outputs[:, -1].chunk(D, dim=-1)
    return outputs, recurrent.RecurrentState(last, last if isinstance(rnn, nn.LSTM) else ())


def _gru_cell(gates: Tensor, recurrent: Tensor, hidden: Tensor, *biases: None) -> tuple[Tensor, Tensor]:
    """Stand in for a kernel that only GPUs have, with its checks and the shapes of its results."""
    rows, width = hidden.shape
    assert gates.dtype == recurrent.dtype == hidden.dtype
    assert gates.shape == recurrent.shape == (rows, 3 * width)
    return torch.empty_like(hidden), hidden.new_empty(rows, 5 * width)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    rows, width = grad.shape
    gates = grad.new_empty(rows, 3 * width)
    return gates, torch.empty_like(gates), torch.empty_like(grad), grad.new_empty(0), grad.new_empty(0)


def _lstm_cell(gates: Tensor, recurrent: Tensor, memory: Tensor, *biases: None) -> tuple[Tensor, ...]:
    rows, width = memory.shape
    assert gates.dtype == recurrent.dtype == memory.dtype
    assert gates.shape == recurrent.shape == (rows, 4 * width)
    return torch.empty_like(memory), torch.empty_like(memory), memory.new_empty(rows, 4 * width)


def _lstm_cell_backward(
    grad: Tensor | None, memory_grad: Tensor | None, before: Tensor, memory: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(workspace), torch.empty_like(memory), memory.new_empty(0)
