"""Requests of all clients, translated together: a queue, and threads that each take a batch of similar length."""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from nmt.config.errors import UserError

PATIENCE = 10  # times `wait`: the longest that a free thread waits while further sentences arrive

Work = Callable[[Sequence[Any]], Sequence[Any]]
"""Items of a batch -> their results, in order."""


class QueueFullError(Exception):
    """No further sentence can wait. `retry_after`: seconds in which the queue is likely to be shorter."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"too many sentences are waiting; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


@dataclass
class _Job:
    work: Work
    key: Hashable  # jobs with equal keys may share a batch; None: alone
    item: Any
    tokens: int
    most_tokens: int  # in a batch, with padding
    arrived: float = field(default_factory=time.monotonic)
    future: "Future[Any]" = field(default_factory=Future)

    def finish(self, outcome: object) -> None:
        """Give the client its result or error."""
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(frozen=True)
class QueueSettings:
    """How a batcher works."""

    workers: int  # threads that each work on a batch of their own
    threads: int  # torch's threads in each worker
    sentences: int  # the longest queue
    wait: float  # seconds that a sentence waits for others to share its batch


class Batcher:
    """A queue of jobs and the threads that work on it.

    A free thread takes the job that has waited longest, so that none starves, and with it those jobs of equal key whose
    lengths are nearest to its own. Free threads share what waits. A cancelled job leaves the queue.
    """

    def __init__(self, settings: QueueSettings, observe: Callable[[int, float], object] = lambda *_: None) -> None:
        """observe: called with the number of jobs and the seconds of each batch."""
        self.settings, self._observe = settings, observe
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._open = True
        self._running = 0  # jobs in batches
        self._rate = 0.0  # jobs per second, a moving mean
        names = (f"nmt-serve-{number}" for number in range(settings.workers))
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """The number of jobs that wait."""
        return len(self._jobs)

    def submit(
        self, work: Work, items: Sequence[Any], tokens: Sequence[int], key: Hashable, most_tokens: int
    ) -> "list[Future[Any]]":
        """Futures of the items' results. tokens: of each item; most_tokens: in a batch with padding.

        Raises QueueFullError, and queues none, if not all may wait.
        """
        with self._changed:
            if len(self._jobs) + len(items) > self.settings.sentences or not self._open:
                raise QueueFullError(max(1.0, len(self._jobs) / self._rate if self._rate else 1.0))
            jobs = [_Job(work, key, item, length, most_tokens) for item, length in zip(items, tokens, strict=True)]
            self._jobs += jobs
            self._changed.notify()
        for job in jobs:
            job.future.add_done_callback(self._forget_cancelled)
        return [job.future for job in jobs]

    def close(self) -> None:
        """Refuse further jobs, finish those that wait, and end the threads."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _forget_cancelled(self, future: "Future[Any]") -> None:
        if future.cancelled():
            with self._changed:
                self._jobs = [job for job in self._jobs if job.future is not future]

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        while batch := self._next_batch():
            started = time.monotonic()
            running = [job for job in batch if job.future.set_running_or_notify_cancel()]
            outcomes = _outcomes(running) if running else []
            seconds = time.monotonic() - started
            with self._changed:
                self._running -= len(batch)
            rate = len(batch) / max(seconds, 1e-6) * self.settings.workers
            self._rate = 0.8 * self._rate + 0.2 * rate if self._rate else rate
            self._observe(len(batch), seconds)  # before the clients can ask for the figures
            for job, outcome in zip(running, outcomes, strict=True):
                job.finish(outcome)

    def _next_batch(self) -> list[_Job]:
        """Wait for a batch; [] once the queue is closed and empty."""
        entered = time.monotonic()
        with self._changed:
            while True:
                while not self._jobs:
                    if not self._open:
                        return []
                    self._changed.wait()
                # Clients that this thread has just answered may soon send more.
                since = max(entered, self._jobs[0].arrived)
                until = min(
                    max(entered, self._jobs[-1].arrived) + self.settings.wait, since + PATIENCE * self.settings.wait
                )
                remaining = until - time.monotonic()
                if remaining <= 0 or not self._open:
                    break
                self._changed.wait(remaining)
            chosen = _similar(self._jobs, -(-(len(self._jobs) + self._running) // self.settings.workers))
            self._running += len(chosen)
            taken = {id(job) for job in chosen}
            self._jobs = [job for job in self._jobs if id(job) not in taken]
            if self._jobs:
                self._changed.notify()
        return chosen


def _outcomes(jobs: list[_Job]) -> list[Any]:
    """The results of jobs; in place of a result, the error of the one job that fails."""
    try:
        return list(jobs[0].work([job.item for job in jobs]))
    except Exception as error:
        if len(jobs) == 1 or not isinstance(error, UserError | MemoryError | RuntimeError):
            return [error for _ in jobs]
        return [outcome for job in jobs for outcome in _outcomes([job])]  # one of them may be at fault


def _similar(jobs: Sequence[_Job], most: int) -> list[_Job]:
    """The first job, and at most so many with those of its key that are nearest to it in length and fit into its
    batch."""
    first = jobs[0]
    if first.key is None:
        return [first]
    others = [job for job in jobs[1:] if job.key == first.key]
    others.sort(key=lambda job: abs(job.tokens - first.tokens))  # of equal distance, the one that has waited longer
    chosen, longest = [first], first.tokens
    for job in others:
        longest = max(longest, job.tokens)
        if len(chosen) == most or longest * (len(chosen) + 1) > first.most_tokens:
            break
        chosen.append(job)
    return chosen
