"""Forward and backward passes as CUDA graphs: recorded once per shape of a batch, then launched as a whole.

A recurrent decoder launches dozens of small kernels at each step. Python needs longer to launch them than the GPU to
compute them, so that without graphs the GPU mostly waits.

Shapes: B batch, S source positions, T target positions.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.data.batching import Batch
from nmt.machine import release_memory
from nmt.objectives.objective import Value

log = logging.getLogger(__name__)

LENGTH_STEP = 8  # lengths are padded to a multiple of this
Shape = tuple[int, int, int]  # B, S, T
Passes = Callable[[Batch, Tensor | int], Value]
"""A batch on the device, and the target tokens to divide by -> its value; adds to the parameters' gradients."""
Record = Callable[[Callable[[], Value]], tuple[Value, Callable[[], None]]]
"""Passes -> the tensors of their value, and a function that computes them again. The recording computes nothing."""


def padded_shape(batch: Batch) -> Shape:
    """The smallest shape for the batch in which lengths are multiples of 8, and B is 2^n or 3 * 2^n."""
    (B, S), T = batch.source.shape, batch.target_in.shape[1]
    power = 1 << (B - 1).bit_length()
    rows = power // 4 * 3 if 0 < B <= power // 4 * 3 else power
    return rows, _next_multiple(S), _next_multiple(T)


def pad_to(batch: Batch, shape: Shape, source_pad: int, target_pad: int) -> Batch:
    """The batch with padding up to this shape. An added sentence has one source position and no target token."""
    B, S, T = shape

    def padded(tensor: Tensor, length: int, value: int) -> Tensor:
        return F.pad(tensor, (0, length - tensor.shape[1], 0, B - tensor.shape[0]), value=value)

    return batch._replace(
        source=padded(batch.source, S, source_pad),
        lengths=F.pad(batch.lengths, (0, B - len(batch.lengths)), value=1),
        target_in=padded(batch.target_in, T, target_pad),
        target_out=padded(batch.target_out, T, target_pad),
    )


class CUDARecorder:
    """Records CUDA graphs. All of them use the same memory, as they never run at the same time."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, passes: Callable[[], Value]) -> tuple[Value, Callable[[], None]]:
        """See Record."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": a thread of NCCL asks for the state of its work at any time.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            value = passes()
        self.pool = self.pool or graph.pool()
        return value, graph.replay


class Recording(NamedTuple):
    """The recorded passes of one shape."""

    batch: Batch  # the tensors that the passes read, all on the device
    tokens: Tensor  # () to divide by
    value: Value  # the tensors that they write; the next recording may overwrite them
    launch: Callable[[], None]

    @classmethod
    def make(cls, passes: Passes, batch: Batch, record: Record) -> Self:
        """Record the passes for batches of this one's shape."""
        tokens = torch.ones((), device=batch.source.device)
        value, launch = record(lambda: passes(batch, tokens))
        return cls(batch, tokens, value, launch)

    def __call__(self, batch: Batch, tokens: int) -> Value:
        """The value of another batch of this shape, on the device."""
        for own, new in zip(_tensors(self.batch), _tensors(batch), strict=True):
            own.copy_(new, non_blocking=True)
        self.tokens.fill_(tokens)
        self.launch()
        return Value(self.value.total.clone(), {name: term.clone() for name, term in self.value.terms.items()})


class GraphedPasses:
    """Forward and backward passes that are recorded when a shape occurs for the second time."""

    def __init__(
        self,
        passes: Passes,
        parameters: Sequence[nn.Parameter],
        pads: tuple[int, int],
        device: torch.device,
        limit: int,
        record: Record | None = None,
    ) -> None:
        """pads: ids of source and target padding; limit: the most recordings; record: None: as CUDA graphs."""
        self.passes, self.parameters, self.pads = passes, parameters, pads
        self.device, self.limit = device, limit
        self.record = CUDARecorder() if record is None else record
        self.seen: Counter[Shape] = Counter()
        self.recordings: dict[Shape, Recording] = {}
        # Of the parameters that have a gradient, the tensors that all recordings add to; known after the first passes.
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.can_record = False

    def clear_gradients(self) -> None:
        """Call this before each update."""
        self.can_record = len(self.gradients) > 0
        if self.can_record:
            torch._foreach_zero_(list(self.gradients.values()))
        for parameter in self.parameters:
            parameter.grad = self.gradients.get(parameter)

    def __call__(self, batch: Batch, tokens: int) -> Value:
        """The value of a batch on the CPU. Adds its gradient, divided by `tokens`, to the parameters' gradients."""
        shape = padded_shape(batch)
        batch = pad_to(batch, shape, *self.pads).to(self.device)
        if shape in self.recordings:
            return self.recordings[shape](batch, tokens)
        self.seen[shape] += 1
        records = self.can_record and self.seen[shape] > 1 and len(self.recordings) < self.limit
        if records:
            batch = batch._replace(lengths=batch.lengths.to(self.device))
        value = self.passes(batch, tokens)
        if not self.gradients:
            used = [parameter for parameter in self.parameters if parameter.grad is not None]
            self.gradients = {parameter: torch.zeros_like(parameter) for parameter in used}
        if records:
            self._add_recording(shape, batch)
        return value

    def _add_recording(self, shape: Shape, batch: Batch) -> None:
        try:
            self.recordings[shape] = Recording.make(self.passes, batch, self.record)
        except RuntimeError as error:
            self.limit = len(self.recordings)
            release_memory()
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            log.warning("training goes on without further CUDA graphs (training.cuda_graphs): %s", reason)


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return batch.source, batch.lengths, batch.target_in, batch.target_out


def _next_multiple(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
