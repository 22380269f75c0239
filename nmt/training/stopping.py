"""What ends a run early: validations without a new best, and signals."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from nmt.evaluate.metrics import sign_of
from nmt.system.distributed import Interrupted

# For this many seconds after the first signal, a SIGINT counts as a copy of the same Ctrl-C: the terminal sends Ctrl-C
# to all processes, and a launcher may pass it on as well.
SAME_CTRL_C = 2.0
log = logging.getLogger(__name__)


class EarlyStopping:
    """Tracks the best monitored score, and decides when it has not improved for too long."""

    def __init__(self, monitor: str, patience: int | None) -> None:
        """patience: number of validations in a row without improvement that ends the run; None for no limit."""
        self.monitor, self.patience = monitor, patience
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # number of validations since the best one

    def update(self, scores: dict[str, float], step: int) -> bool:
        """Record a validation's scores. Returns whether the monitored score is finite and better than all before."""
        score = scores[self.monitor]
        sign = sign_of(self.monitor)
        better = math.isfinite(score) and (self.best is None or sign * score > sign * self.best)
        if better:
            self.best, self.best_step, self.waited = score, step, 0
        else:
            self.waited += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Have `patience` validations in a row brought no improvement?"""
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must store: the best score, its step, and the number of validations since then."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP (closed terminal), unless the process ignores them, as under nohup.

    A cluster's launcher may have installed handlers (submitit: SIGUSR2 saves and requeues the job, SIGTERM is ignored).
    Its SIGTERM and SIGHUP handlers stay. SIGUSR2 is recorded, and its handler is called once the checkpoint is saved.
    Outside the main thread, where Python allows no handlers, nothing is recorded.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers; in other threads than the main one, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return self
        recorded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            recorded.append(signal.SIGINT)
        if callable(signal.getsignal(signal.SIGUSR2)):
            recorded.append(signal.SIGUSR2)
        self._previous = {number: signal.signal(number, self._record) for number in recorded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self, _: int = 0) -> None:
        """Raise Interrupted if a signal was received. The ignored argument lets this serve as a progress callback."""
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def saving(self, save: Callable[[], object]) -> Iterator[None]:
        """Record signals within this context. If Interrupted is raised in it, call `save`, and raise Interrupted again.

        After SIGUSR2, the cluster launcher's own handler runs in between: it requeues the job, which then resumes from
        what was saved. Further signals are only recorded meanwhile.
        """
        with self:
            try:
                yield
            except Interrupted as stop:
                log.warning("%s: saving a checkpoint", stop)
                save()
                if self.received == signal.SIGUSR2:
                    self._previous[self.received](self.received, None)  # may end the process
                raise

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._received_at > SAME_CTRL_C:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once, without a checkpoint
        # Other repeated signals are ignored: when a terminal closes, both the shell and the kernel send SIGHUP.
