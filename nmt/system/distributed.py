"""The group of processes that train or translate together, started by torchrun or a cluster; or one process alone.

All processes run the same program. Each works on its share of the data, and every process receives all results. An
error in one process is raised in all processes, so that no process waits for one that has failed. Waits have no short
timeout, because a validation by one process may take long; torchrun detects a process that has died.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore

from nmt.config.errors import UserError, printable
from nmt.system.processes import UNSET, agent_store, group_size, has_agent, rank, started_in_group

T = TypeVar("T")
S = TypeVar("S", Sequence[Any], NDArray[Any])
Number = TypeVar("Number", int, float)
PORT = "nmt/port"  # key in torchrun's store: the port of the store that rank 0 opens
PATIENCE = 10.0  # seconds after which a process that waits for the others to start says so
MAX_WAIT = timedelta(days=7)  # how long a process waits for another one


class Interrupted(Exception):  # noqa: N818
    """Raised on all processes when one of them has received a signal to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def __str__(self) -> str:
        return signal.Signals(self.signum).name


class OtherProcessFailed(UserError):  # noqa: N818
    """Raised on ranks above 0 when a process has failed; rank 0 prints the reason."""


class _Failure(NamedTuple):
    """The error of one process, in the form that the other processes receive. `error` is a UserError, Interrupted or
    OSError. For any other exception it is None, and `text` is the traceback."""

    error: Exception | None
    text: str


class ProcessGroup:
    """A group of `size` processes, numbered by `rank` from 0. Only rank 0 writes files."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    @contextmanager
    def join(cls) -> Iterator[Self]:
        """Join the group that this process was started in; a process that was started alone gets a group of size 1.
        Tensors on GPUs are sent by NCCL, tensors on CPUs and Python objects by gloo."""
        if not started_in_group():
            yield cls()
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, number, size = (_fresh_store(), rank(), group_size()) if has_agent() else (None, -1, -1)
        with _told_while_waiting():
            dist.init_process_group(backend, timeout=MAX_WAIT, store=store, rank=number, world_size=size)
        yield cls(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()  # not after an error: the end of this process then wakes those that wait for it

    @property
    def is_main(self) -> bool:
        """Is this rank 0, the process that writes files and messages?"""
        return self.rank == 0

    @property
    def hides_progress(self) -> bool | None:
        """Value of tqdm's `disable`: on rank 0 None, which shows a bar if standard error is a terminal; else True."""
        return None if self.is_main else True

    def share(self, items: S) -> S:
        """Return this process's share: the items rank, rank + size, ... If the items are sorted by length, all
        processes thus get sentences of similar lengths."""
        return items[self.rank :: self.size]

    def merge(self, results: Iterable[T]) -> list[T]:
        """Gather the results that each process computed for its `share`; all processes get them, in order. An error in
        one process, while it computes its results, is raised on all processes."""
        if self.size == 1:
            return list(results)
        shares = self._exchange(lambda: list(results))
        # Item i is number i // size in the share of process i % size.
        return [shares[i % self.size][i // self.size] for i in range(sum(map(len, shares)))]

    def everywhere(self, work: Callable[[], T]) -> T:
        """Run `work` on every process and return that process's result. An error on one process is raised on all."""
        if self.size == 1:
            return work()
        results: list[T] = []
        self._exchange(lambda: results.append(work()))
        return results[0]

    def main_first(self, work: Callable[[], T]) -> T:
        """Run `work` as `everywhere` does, but on rank 0 first; the other processes begin when it has finished."""
        result = self.everywhere(work if self.is_main else lambda: None)
        others = self.everywhere((lambda: None) if self.is_main else work)
        return result if self.is_main else others  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result on all processes. An error is raised on all processes."""
        return self._exchange(work if self.is_main else lambda: None)[0] if self.size > 1 else work()  # type: ignore[return-value]

    def from_main(self, items: Iterator[T]) -> Iterator[T]:
        """Yield on all processes the items of rank 0; the iterators of other ranks are not read."""
        while (item := self.on_main(lambda: next(items, None))) is not None:
            yield item

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error of rank 0 on all processes. Only rank 0 calls it, while the others wait in `from_main`."""

        def work() -> NoReturn:
            raise error

        self.on_main(work)
        raise error

    def largest(self, number: Number) -> Number:
        """Return the maximum of the numbers that the processes pass."""
        return number if self.size == 1 else max(self._exchange(lambda: number))

    def refuse_differences(self, value: str, message: str) -> None:
        """Raise UserError on all processes if `value` is not the same on all. The error names the lowest rank whose
        value differs from rank 0's."""
        values = self._exchange(lambda: value) if self.size > 1 else [value]
        if different := [rank for rank, other in enumerate(values) if other != values[0]]:
            self._raise(different[0], UserError(message))

    def _exchange(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every process and return the results of all, by rank. If processes fail, the error of the
        lowest rank among them is raised on rank 0, which prints it, and OtherProcessFailed on the others; Interrupted
        is raised on all."""
        outcome: T | _Failure
        raised: Exception | None = None
        try:
            outcome = work()
        except Exception as error:
            raised = error
            can_be_sent = isinstance(error, UserError | Interrupted | OSError)
            outcome = _Failure(error if can_be_sent else None, "" if can_be_sent else traceback.format_exc())
        outcomes: list[Any] = [None] * self.size
        with _connected():
            dist.all_gather_object(outcomes, outcome)
        failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, _Failure)}
        if not failures:
            return outcomes
        rank, failure = min(failures.items())
        # Raised here, an error keeps its traceback. A UserError of another rank needs none, and rank 0 prints it.
        if raised is not None and rank == self.rank and (self.is_main or not isinstance(raised, UserError)):
            raise raised
        self._raise(rank, failure.error or RuntimeError(f"process {rank}:\n{failure.text}"))

    def _raise(self, rank: int, error: Exception) -> NoReturn:
        """Raise the error of process `rank` on rank 0, which prints the error; raise OtherProcessFailed on other ranks.
        Interrupted is raised on all ranks."""
        if isinstance(error, Interrupted):
            raise error
        if not self.is_main:
            raise OtherProcessFailed(str(error)) from error
        raise UserError(f"process {rank}: {error}") if isinstance(error, UserError) else error


class GradientSum:
    """Sums gradients and a few numbers over all processes, in one all-reduce after the backward pass. An all-reduce
    during the backward pass would gain little, because gradients of recurrent layers are complete only at its end."""

    NUMBERS = 16  # most numbers that one call can sum

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self._sums = torch.zeros(sum(sizes) + self.NUMBERS, device=parameters[0].device)
        *parts, self._numbers = torch.split(self._sums, [*sizes, self.NUMBERS])
        self._parts = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        with _connected():
            dist.all_reduce(self._sums)  # NCCL takes its memory at the first sum: now, before activations fill the GPU

    @torch.no_grad()
    def __call__(self, numbers: Sequence[Tensor | float], contributes: bool) -> Tensor:
        """Replace each parameter's gradient by its sum over all processes. Returns the sums of the numbers, padded with
        zeros: (16,). contributes: False leaves the gradients of this process out of the sum."""
        pairs = [(p, part) for p, part in zip(self.parameters, self._parts, strict=True) if p.grad is not None]
        if not contributes or len(pairs) < len(self._parts):
            self._sums.zero_()
        if contributes:
            torch._foreach_copy_([part for _, part in pairs], [p.grad for p, _ in pairs if p.grad is not None])
        self._numbers.zero_()
        for index, number in enumerate(numbers):
            self._numbers[index] = number
        with _connected():
            dist.all_reduce(self._sums)
        for parameter, part in pairs:
            parameter.grad = part
        return self._numbers.clone()


@contextmanager
def _told_while_waiting() -> Iterator[None]:
    """Print, once the other processes take long to start, whom this process waits for. Variables that an earlier group
    left behind would otherwise let it wait without a word."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    others = f"RANK={rank()}, WORLD_SIZE={group_size()}: waiting for the other processes at {place}; {UNSET}"
    timer = threading.Timer(PATIENCE, lambda: print(printable(others), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _fresh_store() -> Store:
    """Open the store by which the processes find each other: rank 0 starts it, the others connect to it. torchrun's own
    store is not used, because after a restart it still has the addresses of the earlier processes."""
    host = os.environ["MASTER_ADDR"]
    agent = agent_store()
    if rank() == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=MAX_WAIT)
        agent.set(PORT, str(store.port))
        return store
    while True:
        with suppress(dist.DistNetworkError, dist.DistStoreError):  # the port may be that of the store before a restart
            store = TCPStore(host, int(agent.get(PORT)), is_master=False, timeout=timedelta(seconds=2))
            store.set_timeout(MAX_WAIT)
            return store
        time.sleep(0.1)


@contextmanager
def _connected() -> Iterator[None]:
    """Turn errors of communication into a UserError: another process has ended, and has printed the reason."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise it for a lost connection
        if isinstance(error, dist.DistBackendError) or "peer" in str(error) or "onnect" in str(error):
            reason = "another process has ended, so this one ends too"
            raise (OtherProcessFailed if dist.get_rank() else UserError)(reason) from error
        raise
