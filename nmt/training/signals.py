"""Signals that stop a run after the current update, once a checkpoint is saved."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from nmt.system.distributed import Interrupted

log = logging.getLogger(__name__)
SAME_CTRL_C = 2.0  # seconds in which a launcher may pass on the Ctrl-C that the terminal has sent to all processes


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP (closed terminal), unless the process ignores them, as under nohup.

    A cluster's launcher installs its own handlers (submitit: SIGUSR2 saves and requeues the job, SIGTERM is ignored).
    Its SIGTERM and SIGHUP handlers stay; its SIGUSR2 handler is called once the checkpoint is saved.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        recorded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            recorded.append(signal.SIGINT)
        if callable(signal.getsignal(signal.SIGUSR2)):
            recorded.append(signal.SIGUSR2)
        self._previous = {number: signal.signal(number, self._record) for number in recorded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Was a signal received?"""
        return self.received is not None

    def check(self, _: int = 0) -> None:
        """Raises Interrupted if a signal was received."""
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def saving(self, save: Callable[[], object]) -> Iterator[None]:
        """Record signals within this context, and call `save` if they end it. They are recorded until that is done."""
        with self:
            try:
                yield
            except Interrupted as stop:
                log.warning("%s: saving a checkpoint", stop)
                save()
                self._call_launcher()
                raise

    def _call_launcher(self) -> None:
        """Call the launcher's handler of the received signal; it may end the process."""
        if self.received == signal.SIGUSR2:
            handler: Callable[[int, FrameType | None], object] = self._previous[self.received]
            handler(self.received, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._received_at > SAME_CTRL_C:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once, without a checkpoint
        # Other signals may repeat: when a terminal closes, both shell and kernel send SIGHUP.
