"""Records work on a GPU as CUDA graphs, which one call launches as a whole."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CUDARecorder:
    """Records CUDA graphs, which all use the same memory because no two run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def compute(self, work: Callable[[], T]) -> T:
        """Do, without recording, the work that will be recorded next, on the stream that will record it."""
        others = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(others)
        try:
            with torch.cuda.stream(self.stream):
                return work()
        finally:
            others.wait_stream(self.stream)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record work as a graph, without running a kernel.

        Returns the result, whose tensors the graph writes, and a function that launches the graph. Raises RuntimeError
        if the work cannot be recorded.
        """
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


def reason_of(error: BaseException) -> str:
    """Return the first line of the error that made a recording fail."""
    cause = error.__context__ or error
    return next(iter(str(cause).splitlines()), type(cause).__name__)
