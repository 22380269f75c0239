"""How this process was started, alone or in a group by torchrun or a cluster; and its worker processes.

Imports torch only within a function, so that a command's --help does not wait for torch.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from nmt.config.errors import UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
UNSET = "to run a process alone, unset RANK and WORLD_SIZE"
AHEAD = 4  # most tasks per worker that are submitted but whose results are not used yet; limits memory

Task = TypeVar("Task")
Result = TypeVar("Result")


def started_in_group() -> bool:
    """Was this process started together with others, as the variables of torchrun say? An empty one is not set."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(map(os.environ.get, names)) and _number("WORLD_SIZE") > 1


def rank() -> int:
    """Return the number of this process in its group, from 0; 0 for a process alone."""
    return _number("RANK") if started_in_group() else 0


def group_size() -> int:
    """Return the number of processes in this process's group; 1 for a process alone."""
    return _number("WORLD_SIZE") if started_in_group() else 1


def local_rank() -> int | None:
    """Return the number of this process among the group's processes on this machine; None for a process alone."""
    return _number("LOCAL_RANK") if started_in_group() else None


def local_group_size() -> int:
    """Return the number of the group's processes on this machine, as far as this process knows."""
    return max(_number("LOCAL_WORLD_SIZE"), (local_rank() or 0) + 1)


def _number(name: str) -> int:
    return int(os.environ.get(name) or "0")


def leave_group() -> None:
    """Forget that this process was started with others: for work that processes do not share."""
    for name in GROUP_VARIABLES:
        os.environ.pop(name, None)


def leave(status: int) -> NoReturn:
    """Write what the standard streams hold, and end this process without waiting for other processes or threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def joined() -> bool:
    """Has this process joined a group, whose members tell each other of errors?"""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join_cluster() -> None:
    """Set the variables that torchrun would set, if submitit started this process as one of several tasks."""
    if "SUBMITIT_EXECUTOR" not in os.environ or started_in_group():
        return
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)


def agreed(name: str, value: str) -> str:
    """Return the `value` that the first caller in the group passed for this `name`, even before a restart by torchrun.
    In a process or group that torchrun did not start, returns the caller's own `value`."""
    return bytes(agent_store().compare_set(f"nmt/{name}", "", value)).decode() if has_agent() else value


def has_agent() -> bool:
    """Was this group started by torchrun, whose agent restarts processes that fail?"""
    return started_in_group() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store() -> "TCPStore":
    """Connect to torchrun's store, which keeps its content when the processes are restarted."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def end_with(launcher: int) -> None:
    """Send this process SIGTERM within a second after its parent, the process `launcher`, has ended. A launcher that is
    killed cannot end its processes. SIGTERM lets a run save a checkpoint first."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Workers:
    """Worker processes that apply functions to tasks. They start when `map` first has a task for them. They end with
    the context of this object, and also if the main process is killed."""

    def __init__(self, count: int | None, key: str) -> None:
        """count: number of processes, or None for one per core; 1 does all tasks in the main process. key: the
        configuration's key for this number, for messages."""
        self._count, self._key = count or cores(), key
        if multiprocessing.current_process().daemon:  # Python lets a daemonic process start no others
            self._count = 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task], in_main: int) -> Iterator[Result]:
        """Yield the results of the tasks in order. The main process does the first `in_main` tasks.

        `function` is pickled with each task, so it should be small. An exception of a task, or of the iterator of
        tasks, is raised after the results of all earlier tasks. Raises UserError if a worker is killed.
        """
        remaining = iter(tasks)
        yield from map(function, remaining if self._count == 1 else islice(remaining, in_main))
        futures: deque[Future[Result]] = deque()
        end: Exception | None = None  # what ended the iterator of tasks: StopIteration or an error
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
        """Submit a task to the pool of worker processes, which the first task starts."""
        with clean_start():
            if self._pool is None:
                context = multiprocessing.get_context("spawn")  # a fork of a process with threads may deadlock
                self._pool = ProcessPoolExecutor(self._count, context, initializer=end_with, initargs=(os.getpid(),))
                resource_tracker.ensure_running()  # now, so that it does not inherit the signal mask set below
            # Workers inherit this mask and so ignore Ctrl-C, which a terminal sends to all: the main process ends them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return self._pool.submit(function, task)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def clean_start() -> Iterator[None]:
    """Keep processes that start in this context from importing the main module: a script that calls `nmt.train` outside
    `if __name__ == "__main__":` would train again in each of them."""
    main = vars(sys.modules["__main__"])
    names: list[str] = [name for name in ("__spec__", "__file__") if name in main]
    hidden = {name: main.pop(name) for name in names}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables within this context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def handlers_restored(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Restore this process's handlers of these signals after the context: some libraries leave theirs in place."""
    before = {number: signal.getsignal(number) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler that was set outside Python cannot be restored
                signal.signal(number, handler)
