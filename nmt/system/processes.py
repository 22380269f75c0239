"""How this process was started, alone or with others by torchrun or a cluster, and worker processes of its own.

Imports no torch until it must.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Self, TypeVar

from nmt.config.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

AHEAD = 4  # tasks per worker process whose results are not yet used: bounds memory

Task = TypeVar("Task")
Result = TypeVar("Result")


def started_in_group() -> bool:
    """Was this process started together with others?"""
    names = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return names <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    """The number of this process among all, from 0."""
    return int(os.environ["RANK"]) if started_in_group() else 0


def local_rank() -> int | None:
    """The number of this process among those on its machine, from 0; None for a process alone."""
    return int(os.environ.get("LOCAL_RANK", "0")) if started_in_group() else None


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join_cluster() -> None:
    """In a cluster's job of several tasks, started by submitit, set the variables that torchrun would set."""
    if "SUBMITIT_EXECUTOR" not in os.environ or started_in_group():
        return
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def agreed(name: str, value: str) -> str:
    """The value of the first process that calls this, also after torchrun has restarted the processes."""
    return bytes(agent_store().compare_set(f"nmt/{name}", "", value)).decode() if has_agent() else value


def has_agent() -> bool:
    """Does torchrun watch over this process and others, and restart them?"""
    return started_in_group() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store() -> "TCPStore":
    """torchrun's store, which outlives a restart."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def end_with(launcher: int) -> None:
    """Send this process SIGTERM within a second after its parent, the process `launcher`, has ended.

    A launcher that is killed cannot end its processes. SIGTERM lets a run save a checkpoint first.
    """

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Workers:
    """Processes that apply functions to tasks. They start when `map` has more tasks than the main process should do.

    A context manager: the processes end with it. They also end if the main process is killed.
    """

    def __init__(self, count: int | None, key: str) -> None:
        """count: number of processes, default one for each core; 1 starts none. key: the setting of this number."""
        self._count, self._key = count or cores(), key
        if multiprocessing.current_process().daemon:  # such a process may not start others
            self._count = 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task], in_main: int) -> Iterator[Result]:
        """Yield the results of the tasks in order; the first `in_main` tasks are done in this process.

        `function` must be picklable, and small, as each task takes it along. An exception of a task, or of the iterator
        of tasks, is raised after the results of the tasks before it. Raises UserError if a worker is killed.
        """
        remaining = iter(tasks)
        yield from map(function, remaining if self._count == 1 else islice(remaining, in_main))
        futures: deque[Future[Result]] = deque()
        end: Exception | None = None  # of the tasks: StopIteration or an error
        try:
            while True:
                while end is None and len(futures) < AHEAD * self._count:
                    try:
                        task = next(remaining)
                    except Exception as error:
                        end = error
                    else:
                        futures.append(self._submit(function, task))
                if not futures:
                    break
                yield futures.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                f"{self._key}={self._count}: a worker process was killed; if memory ran out, set a lower {self._key}"
            ) from None
        if end is not None and not isinstance(end, StopIteration):
            raise end

    def _submit(self, function: Callable[[Task], Result], task: Task) -> "Future[Result]":
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # a fork of a process with threads may deadlock
            self._pool = ProcessPoolExecutor(self._count, context, initializer=end_with, initargs=(os.getpid(),))
            resource_tracker.ensure_running()  # here, so that it does not inherit the mask of signals below
        # A worker inherits the mask: Ctrl-C reaches all processes of a terminal, but the main one ends the workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(function, task)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
