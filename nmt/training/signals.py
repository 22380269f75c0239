"""Signals that ask a run to stop, heeded where a checkpoint can be written."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(Exception):  # noqa: N818
    """A signal asked the run to stop; the last checkpoint holds everything."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Notes SIGINT and SIGTERM, and what a cluster's launcher sends before it queues the job again.

    Such a launcher has handlers of its own (submitit: SIGUSR2, and one that ignores SIGTERM): its SIGTERM stays with
    it, its SIGUSR2 is handed on once the checkpoint is written.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        ours = [signal.SIGINT]
        if not _is_a_launchers(signal.SIGTERM):
            ours.append(signal.SIGTERM)
        if _is_a_launchers(signal.SIGUSR2):
            ours.append(signal.SIGUSR2)
        self._previous = {number: signal.signal(number, self._note) for number in ours}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def hand_on(self) -> None:
        """Let the launcher do what it does at the signal that was noted: it may end the process."""
        if self.noted == signal.SIGUSR2:
            handler: Callable[[int, FrameType | None], object] = self._previous[self.noted]
            handler(self.noted, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            raise KeyboardInterrupt  # asked twice: now
        self.noted = number


def _is_a_launchers(number: signal.Signals) -> bool:
    return callable(signal.getsignal(number))
