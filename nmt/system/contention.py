"""Sharing the processor fairly: how OpenMP's threads wait when other processes are busy.

Threads that wait for each other at the end of an operation spin, because an idle processor makes that the fastest way.
On a busy machine each of them may be spinning while the kernel runs another process instead of the thread they wait
for: beside one busy process, training on two cores fell to a fiftieth of its speed. GNU's OpenMP spins for a moment
only while it manages more threads than there are CPUs ("GOMP_SPINCOUNT" in its manual). So idle threads are added while
the machine is busy. Results stay the same: the number of threads that compute does not change.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nmt.system.processes import cores

PERIOD = 1.0  # seconds between looks at the machine
MARGIN = 0.25  # CPUs that other processes may use without any consequence
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # by which users choose for themselves


class Usage(NamedTuple):
    """CPU seconds spent so far."""

    all: float  # by all processes, on the CPUs that this one may use
    own: float  # by this process
    clock: float  # seconds

    @classmethod
    def now(cls) -> "Usage":
        """Read the current usage from /proc (Linux only)."""
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
        # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of these
        ticks = [[int(word) for word in words[1:9]] for words in lines if words[0] in allowed]
        busy = sum(sum(times) - times[3] - times[4] for times in ticks) / os.sysconf("SC_CLK_TCK")
        used = os.times()
        return cls(busy, used.user + used.system, time.monotonic())


def is_contended(before: Usage, after: Usage, threads: int, cpus: int) -> bool:
    """Did other processes leave too few CPUs for this number of threads between these two moments?"""
    others = (after.all - before.all - (after.own - before.own)) / (after.clock - before.clock)
    return others > MARGIN and threads + others > cpus + MARGIN


class IdleThreads:
    """Threads of OpenMP that do nothing, so many that OpenMP manages more threads than there are CPUs."""

    def __init__(self, threads: int, cpus: int) -> None:
        """threads: those that compute, at least two. Each Python thread starts as many, itself among them."""
        groups = math.ceil(max(1, cpus + 1 - threads) / (threads - 1))
        self._end, started = threading.Event(), threading.Barrier(groups + 1)
        for _ in range(groups):
            threading.Thread(target=self._wait, args=(started,), daemon=True).start()
        started.wait()

    def _wait(self, started: threading.Barrier) -> None:
        torch.ones(2**17).add_(1.0)  # large enough for OpenMP to start its threads
        started.wait()
        self._end.wait()

    def end(self) -> None:
        """End them: OpenMP's threads end with the Python threads that started them."""
        self._end.set()


@contextmanager
def fair_waiting() -> Iterator[None]:
    """Within this context, waiting threads sleep while other processes are busy. It affects the whole process, so only
    commands enter it, after they have set the number of threads. Without GNU's OpenMP on Linux, it changes nothing."""
    threads = torch.get_num_threads()
    if threads == 1 or not _has_gnu_openmp() or any(name in os.environ for name in SETTINGS):
        yield
        return
    end = threading.Event()
    watch = threading.Thread(target=_watch, args=(threads, cores(), end), daemon=True)
    watch.start()
    try:
        yield
    finally:
        end.set()
        watch.join()


def _has_gnu_openmp() -> bool:
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        return any("libgomp" in line for line in file)


def _watch(threads: int, cpus: int, end: threading.Event) -> None:
    idle, before = None, Usage.now()
    while not end.wait(PERIOD):
        after = Usage.now()
        contended = is_contended(before, after, threads, cpus)
        if contended and idle is None:
            idle = IdleThreads(threads, cpus)
        elif idle is not None and not contended:
            idle.end()
            idle = None
        before = after
    if idle is not None:
        idle.end()
