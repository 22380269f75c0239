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
    """Notes SIGINT, SIGTERM and SIGHUP (the terminal was closed), unless the process ignores them, as nohup asks.

    A cluster's launcher has handlers of its own (submitit: SIGUSR2 to save and queue the job again, and one that
    ignores SIGTERM). Its SIGTERM and SIGHUP stay with it; SIGUSR2 is passed on once the checkpoint is written.
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            ours.append(signal.SIGINT)
        if callable(signal.getsignal(signal.SIGUSR2)):
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
        if self.noted is None:
            self.noted = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C: stop at once, without a checkpoint
        # Others repeat on their own: a closed terminal sends SIGHUP from the shell and from the kernel.
