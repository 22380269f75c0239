"""Worker processes that share the work on a corpus. Results come in the order of the tasks, for any number of them."""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, count, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from nmt.config.errors import UserError
from nmt.system.processes import cores

QUEUED = 2  # tasks that a worker has at a time, so that it need not wait for the next one
AHEAD = 4  # tasks per worker whose results are not yet yielded: bounds memory

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Processes that apply functions to tasks. They start when `map` has more tasks than the main process should do.

    A context manager: the processes end with it, at once. They also end if the main process is killed.
    """

    def __init__(self, workers: int | None) -> None:
        """workers: number of processes, None for one per core; with 1, all work is done in this process."""
        self._count = workers or cores()
        if multiprocessing.current_process().daemon:  # such a process may not start others
            self._count = 1
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for connection, process in self._processes.items():
            process.kill()
            process.join()
            connection.close()
        self._processes = {}

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task], in_main: int) -> Iterator[Result]:
        """Results of the tasks, in order; the first `in_main` tasks are done in this process.

        `function` must be picklable. An exception of a task, or of the iterator of tasks, is raised after the results
        of the tasks before it. Raises UserError if a worker is killed. Consume all results before the next call.
        """
        remaining = iter(tasks)
        yield from map(function, remaining if self._count == 1 else islice(remaining, in_main))
        for task in islice(remaining, 1):
            self._start()
            self._broadcast(function)
            yield from self._map(chain([task], remaining))

    def _map(self, tasks: Iterator[Task]) -> Iterator[Any]:
        queued = dict.fromkeys(self._processes, 0)
        results: dict[int, tuple[bool, Any]] = {}
        sent = 0
        end: Exception | None = None  # of the tasks: StopIteration or an error
        for position in count():
            while position not in results:
                while end is None and sent - position < AHEAD * len(queued) and min(queued.values()) < QUEUED:
                    connection = min(queued, key=lambda each: queued[each])
                    try:
                        self._send(connection, (sent, next(tasks)))
                    except Exception as error:
                        end = error
                    else:
                        queued[connection] += 1
                        sent += 1
                if position == sent:
                    if isinstance(end, StopIteration):
                        return
                    assert end is not None
                    raise end
                for ready in cast(list[Connection], wait([each for each in queued if queued[each]])):
                    number, success, value = self._receive(ready)
                    results[number] = success, value
                    queued[ready] -= 1
            success, value = results.pop(position)
            if not success:
                raise value
            yield value

    def _start(self) -> None:
        """Start the processes. They are not forked: a fork of a process with threads may deadlock."""
        if self._processes:
            return
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # it would change the mask below
        # A worker inherits the mask: Ctrl-C reaches all processes of a terminal, but the main one ends the workers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), name=f"preparation {number}", daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _broadcast(self, function: Callable[..., Any]) -> None:
        for connection in self._processes:
            self._send(connection, (None, function))

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._lost(connection) from None

    def _receive(self, connection: Connection) -> tuple[int, bool, Any]:
        try:
            return cast(tuple[int, bool, Any], connection.recv())
        except (EOFError, OSError):
            raise self._lost(connection) from None

    def _lost(self, connection: Connection) -> UserError:
        process = self._processes[connection]
        process.join(1)
        code = process.exitcode or 0
        how = f"was killed ({signal.strsignal(-code)})" if code < 0 else f"ended (exit status {code})"
        return UserError(
            f"data.workers={self._count}: a worker process {how}; if memory ran out, set a lower data.workers"
        )


def _serve(connection: Connection) -> None:
    """A worker: apply the latest function to each task."""
    received: queue.SimpleQueue[tuple[int | None, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive_all, args=(connection, received), daemon=True).start()
    _, function = received.get()
    while True:
        number, value = received.get()
        if number is None:
            function = value
            continue
        try:
            result = True, function(value)
        except Exception as error:
            result = False, _picklable(error)
        with suppress(BrokenPipeError):  # `_receive_all` ends the process
            connection.send((number, *result))


def _receive_all(connection: Connection, received: "queue.SimpleQueue[Any]") -> None:
    """Pass on messages, so that the main process never waits to send one; end the process with the main one."""
    while True:
        try:
            received.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)


def _picklable(error: Exception) -> Exception:
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
