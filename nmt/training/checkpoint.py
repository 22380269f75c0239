"""Checks checkpoints before a run resumes, tracks the best validation, and records signals to stop."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.evaluate.metrics import sign_of
from nmt.model.checkpoints import read_checkpoint, same_form
from nmt.system.distributed import Interrupted

# For this many seconds after the first signal, a SIGINT counts as a copy of the same Ctrl-C: the terminal sends Ctrl-C
# to all processes, and a launcher may pass it on as well.
SAME_CTRL_C = 2.0
log = logging.getLogger(__name__)


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint without executing code in it. Raises UserError if it is damaged."""
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: is corrupt; delete it to train from the start, or restore a copy") from None


def check(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that a checkpoint has the tensor shapes of this model and optimizer, and valid numbers.

    Raises ValueError for a wrong shape or number. A checkpoint with another structure can raise any other exception,
    such as KeyError.
    """
    weights = model.state_dict()
    if not all(same_form(state[name], weights) for name in ("model", "updated") if name in state):
        raise ValueError("the weights of another model")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["optimizer"]["state"].items():
        shapes = {parameters[number].shape, torch.Size([])}
        if any(isinstance(value, Tensor) and value.shape not in shapes for value in values.values()):
            raise ValueError("the optimizer's state is that of another model")
    stopping, (seconds, tokens), (updates, window_tokens, window_seconds) = (
        state[name] for name in ("stopping", "spent", "window")
    )
    counts = [state[name] for name in ("step", "epoch", "batch_index", "validated", "total_steps")]
    counts += [*state["bad"], state["logged_step"] + 1, tokens, window_tokens]
    counts += [stopping["best_step"], stopping["waited"]]
    if any(type(count) is not int or count < 0 for count in counts) or min(seconds, window_seconds) < 0:
        raise ValueError("a count is not a natural number")
    if not isinstance(stopping["best"], float | int | None):
        raise ValueError("the best score is not a number")
    if any(term.dim() or update.keys() != updates[0].keys() for update in updates for term in update.values()):
        raise ValueError("a sum is not a number")


@contextmanager
def use_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Load a state dict into the model within this context; at its end, restore the previous values bit for bit.

    Values are copied into the model's tensors: tied parameters stay tied, and cuDNN's parameters stay contiguous.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(before)


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
        if threading.current_thread() is not threading.main_thread():
            return self
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

    def check(self, _: int = 0) -> None:
        """Raise Interrupted if a signal was received. The ignored argument lets this serve as a progress callback."""
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def saving(self, save: Callable[[], object]) -> Iterator[None]:
        """Record signals within this context. If Interrupted is raised in it, call `save`, then the launcher's handler
        if the signal was SIGUSR2, and raise Interrupted again. Further signals are still recorded meanwhile."""
        with self:
            try:
                yield
            except Interrupted as stop:
                log.warning("%s: saving a checkpoint", stop)
                save()
                self._call_launcher()
                raise

    def _call_launcher(self) -> None:
        """Call the launcher's handler if SIGUSR2 was received. The handler may end the process."""
        if self.received == signal.SIGUSR2:
            handler: Callable[[int, FrameType | None], object] = self._previous[self.received]
            handler(self.received, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._received_at > SAME_CTRL_C:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once, without a checkpoint
        # Other repeated signals are ignored: when a terminal closes, both the shell and the kernel send SIGHUP.
