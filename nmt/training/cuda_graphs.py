"""Runs forward and backward passes as CUDA graphs: records one for each shape of a batch, and replays it from then on.

A recurrent decoder launches dozens of small kernels at each step. Python takes longer to launch them than the GPU takes
to compute them, so that without graphs the GPU mostly waits. In this file, "passes" are a forward and a backward pass.

Shapes: B batch, S source positions, T target positions.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.data.batching import Batch
from nmt.system.machine import release_memory
from nmt.training.losses import Value

T = TypeVar("T")
log = logging.getLogger(__name__)

LENGTH_STEP = 8  # source and target lengths are padded to a multiple of this
Shape = tuple[int, int, int]  # B, S, T
Passes = Callable[[Batch, Tensor | int, int], Value]
"""Runs a forward and a backward pass: (batch on the device, target tokens, number of the update) -> value of the batch.
Adds the gradient, divided by the target tokens, to the parameters' gradients."""


def padded_shape(batch: Batch) -> Shape:
    """Return the smallest shape (B, S, T) that holds a batch, with B = 2^n or 3 * 2^n, and S and T multiples of 8."""
    (B, S), T = batch.source.shape, batch.target_in.shape[1]
    power = 1 << (B - 1).bit_length()
    sentences = power // 4 * 3 if 0 < B <= power // 4 * 3 else power
    return sentences, -(-S // LENGTH_STEP) * LENGTH_STEP, -(-T // LENGTH_STEP) * LENGTH_STEP


def pad_to(batch: Batch, shape: Shape, source_pad: int, target_pad: int) -> Batch:
    """Pad a batch to this shape. An added sentence has source length 1, and only padding as its target."""
    B, S, T = shape

    def padded(tensor: Tensor, length: int, value: int) -> Tensor:
        return F.pad(tensor, (0, length - tensor.shape[1], 0, B - tensor.shape[0]), value=value)

    alignment = batch.alignment
    if alignment is not None:
        old_B, old_T, old_S = alignment.shape
        alignment = F.pad(alignment, (0, S - old_S, 0, T - old_T, 0, B - old_B))
    return batch._replace(
        source=padded(batch.source, S, source_pad),
        lengths=F.pad(batch.lengths, (0, B - len(batch.lengths)), value=1),
        target_in=padded(batch.target_in, T, target_pad),
        target_out=padded(batch.target_out, T, target_pad),
        alignment=alignment,
    )


class CUDARecorder:
    """Records CUDA graphs, which all use the same memory because no two run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compute(self, work: Callable[[], T]) -> T:
        """Run, without recording, the work that will be recorded next, on the stream that will record it."""
        others = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(others)
        try:
            with torch.cuda.stream(self.stream):
                return work()
        finally:
            others.wait_stream(self.stream)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record work as a graph, without running a kernel. Returns the result, whose tensors the graph writes, and a
        function that launches the graph. Raises RuntimeError if the work cannot be recorded."""
        graph, others = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            result = self._record(graph, work, self.pool)
        except RuntimeError:
            # After a failure, torch leaves the recording stream current, and its random generator in recording mode.
            # A second recording resets the generator.
            torch.cuda.set_stream(others)
            with suppress(RuntimeError):
                self._record(torch.cuda.CUDAGraph(), lambda: torch.zeros((), device=self.device))
            raise
        return result, graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], T], pool: Any = None) -> T:  # noqa: ANN401
        # "thread_local" lets other threads call CUDA, because a thread of NCCL queries NCCL's progress at any time.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            return work()


class Recording(NamedTuple):
    """A CUDA graph of the passes over batches of one shape, with the tensors that it reads and writes."""

    batch: Batch  # input; all tensors are on the device
    tokens: Tensor  # () input: number of target tokens to divide gradients by
    value: Value  # output; all recordings share memory, so that launching another recording may overwrite it
    launch: Callable[[], None]

    @classmethod
    def make(cls, passes: Passes, batch: Batch, step: int, recorder: CUDARecorder) -> Self:
        """Record the passes over batches of this shape, in update number `step`. The batch's tensors become the input
        of the recording."""
        tokens = torch.ones((), device=batch.source.device)
        value, launch = recorder.record(lambda: passes(batch, tokens, step))
        return cls(batch, tokens, value, launch)

    def __call__(self, batch: Batch, tokens: int) -> Value:
        """Compute the value of a batch of the recorded shape on the device: copy it to the input, launch the graph."""
        for recorded, new in zip(_tensors(self.batch), _tensors(batch), strict=True):
            recorded.copy_(new, non_blocking=True)
        self.tokens.fill_(tokens)
        self.launch()
        return Value(self.value.total.clone(), {name: term.clone() for name, term in self.value.terms.items()})


class GraphedPasses:
    """Runs forward and backward passes, and records them when a shape occurs for the second time."""

    def __init__(
        self,
        passes: Passes,
        parameters: Sequence[nn.Parameter],
        pads: tuple[int, int],
        device: torch.device,
        limit: int,
        recorder: CUDARecorder | None = None,
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """parameters: all parameters of the model; pads: ids of source and target padding; limit: largest number of
        recordings, beyond which batches of further shapes run without one; timed: returns a context that times the
        work of making a recording."""
        self.passes, self.parameters, self.pads = passes, parameters, pads
        self.device, self.limit, self.timed = device, limit, timed
        self.recorder = CUDARecorder(device) if recorder is None else recorder
        self.seen: Counter[Shape] = Counter()
        self.recordings: dict[Shape, Recording] = {}
        # For each parameter with a gradient, the tensor that all recordings add its gradient to. Filled after the first
        # batch, which shows which parameters have a gradient.
        self.recorded_gradients: dict[nn.Parameter, Tensor] = {}
        self.gradients_installed = False  # are these tensors the gradients of their parameters?

    def clear_gradients(self) -> None:
        """Clear gradients before each update, in place of the optimizer's `zero_grad`.

        The tensors that recordings add gradients to are set to zero, and are installed as the gradients of their
        parameters. A recording adds to the gradients that were installed when it was made. It can therefore be made
        only in an update that begins with these tensors, and not in the one whose first batch creates them.
        """
        self.gradients_installed = len(self.recorded_gradients) > 0
        if self.gradients_installed:
            torch._foreach_zero_(list(self.recorded_gradients.values()))
        for parameter in self.parameters:
            parameter.grad = self.recorded_gradients.get(parameter)

    def __call__(self, batch: Batch, tokens: int, step: int) -> Value:
        """Move a batch from the CPU to the device, compute its loss terms there, and add the gradient of the whole
        loss, divided by `tokens`, to the parameters' gradients.

        Until the limit is reached, every batch is padded and its lengths are moved to the device, even if its shape has
        no recording yet. Dropout therefore draws the same masks with and without a recording.
        """
        shape = padded_shape(batch)
        if shape not in self.recordings and len(self.recordings) >= self.limit:
            return self._run(batch.to(self.device), tokens, step)
        batch = pad_to(batch, shape, *self.pads).to(self.device)
        batch = batch._replace(lengths=batch.lengths.to(self.device, non_blocking=True))
        if shape in self.recordings:
            return self.recordings[shape](batch, tokens)
        self.seen[shape] += 1
        if self.gradients_installed and self.seen[shape] > 1:
            with self.timed():
                return self._record(shape, batch, tokens, step)
        return self._run(batch, tokens, step)

    def _run(self, batch: Batch, tokens: int, step: int) -> Value:
        """Compute the value of a batch without a recording. The first batch shows which parameters have a gradient."""
        value = self.passes(batch, tokens, step)
        if not self.recorded_gradients:
            used = [parameter for parameter in self.parameters if parameter.grad is not None]
            self.recorded_gradients = {parameter: torch.zeros_like(parameter) for parameter in used}
        return value

    def _record(self, shape: Shape, batch: Batch, tokens: int, step: int) -> Value:
        """Compute the value of a batch, and record the passes for later batches of its shape."""
        # Autograd's nodes that add to gradients must be created on the recording stream before the recording. Reference
        # cycles of earlier passes would keep nodes alive that belong to another stream.
        gc.collect()
        release_memory()  # torch cannot use memory on the recording stream that it caches for another stream
        value = self.recorder.compute(lambda: self.passes(batch, tokens, step))
        try:
            self.recordings[shape] = Recording.make(self.passes, batch, step, self.recorder)
            if len(self.recordings) == self.limit:
                log.info("batches of further shapes are computed without CUDA graphs (training.cuda_graphs)")
        except RuntimeError as error:
            self.limit = len(self.recordings)
            cause = error.__context__ or error
            reason = next(iter(str(cause).splitlines()), type(cause).__name__)
            log.warning("batches of further shapes are computed without CUDA graphs (training.cuda_graphs): %s", reason)
        return value


def _tensors(batch: Batch) -> list[Tensor]:
    return [part for part in batch if isinstance(part, Tensor)]
