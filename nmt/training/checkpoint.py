"""Checkpoints: what a run resumes from, the weights that it keeps, and the signals that save it.

It keeps those of the best validations, and at the end their average: updates circle around a minimum, and the mean of
several weights is nearer to it than any of them.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.config.schema.training import LOWER_IS_BETTER
from nmt.model.checkpoints import BEST, read_checkpoint, same_form, save_checkpoint
from nmt.system.distributed import Interrupted, ProcessGroup
from nmt.training.validation import Validation

SAME_CTRL_C = 2.0  # seconds in which a launcher may pass on the Ctrl-C that the terminal has sent to all processes
log = logging.getLogger(__name__)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: .safetensors for the weights of a validation, .pt for the state of training."""
    save_checkpoint(path, state)


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint without executing code in it. Raises UserError if it is damaged."""
    try:
        return read_checkpoint(path)
    except ValueError:
        raise UserError(f"{path}: is corrupt; delete it to train from the start, or restore a copy") from None


def check(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that a state has the sizes of this model and optimizer, and numbers where numbers are expected.

    Raises ValueError for the wrong size or number, any other exception for the wrong structure.
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
    counts = [state[name] for name in ("step", "epoch", "position", "validated", "total_steps")]
    counts += [*state["bad"], state["logged_step"] + 1, tokens, window_tokens]
    counts += [stopping["best_step"], stopping["waited"]]
    if any(type(count) is not int or count < 0 for count in counts) or min(seconds, window_seconds) < 0:
        raise ValueError("a count is not a natural number")
    if not isinstance(stopping["best"], float | int | None):
        raise ValueError("the best score is not a number")
    if any(term.dim() or update.keys() != updates[0].keys() for update in updates for term in update.values()):
        raise ValueError("a sum is not a number")


@contextmanager
def swapped_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the model these weights within this context; afterwards it has its previous ones again, bit for bit.

    Values are copied into the model's tensors, so tied parameters stay tied and cuDNN's weights contiguous.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(before)


def mean_weights(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the weights of one or more models (Junczys-Dowmunt et al. 2016; Vaswani et al. 2017, 6.1)."""
    totals: dict[str, Tensor] = {}
    count = 0
    for model in models:  # only one is in memory at a time
        totals = {name: totals[name] + weight if count else weight.double() for name, weight in model.items()}
        count += 1
    return {name: (total / count).float() for name, total in totals.items()}


def cost(monitor: str, score: float) -> float:
    """Convert a monitored score to a cost, which is lowest for the best validation, or a cost to the score."""
    return score if monitor in LOWER_IS_BETTER else -score


class EarlyStopping:
    """Follows the monitored score and ends a run when it has not improved for too long."""

    def __init__(self, monitor: str, patience: int | None) -> None:
        """patience: how many validations without improvement end the run; None: any number is fine."""
        self.monitor, self.patience = monitor, patience
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # validations since the best one

    def update(self, scores: dict[str, float], step: int) -> bool:
        """Record a validation. Returns whether it is the best so far; an equal score or NaN is not."""
        score = scores[self.monitor]
        better = self.best is None or cost(self.monitor, score) < cost(self.monitor, self.best)
        better = better and math.isfinite(score)
        if better:
            self.best, self.best_step, self.waited = score, step, 0
        else:
            self.waited += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Is the patience exhausted?"""
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must store: the best score and its step, and the validations since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]


class Average(NamedTuple):
    """The outcome of averaging the best checkpoints at the end of a run."""

    step: int  # the end of the run
    steps: list[int]  # of the averaged validations
    monitor: str
    score: float
    single: float  # the score of the best single validation
    taken: bool  # is the average the best checkpoint?


class BestCheckpoints:
    """The best checkpoint and, if several are averaged, step-STEP.safetensors for each of the `count` best validations.

    They stay when the run has ended, so that a run which is extended can average the best of all its validations. Users
    may delete them to save space.
    """

    def __init__(self, directory: Path, monitor: str, count: int, group: ProcessGroup | None = None) -> None:
        """group: the processes that read the checkpoints; rank 0 writes them."""
        self.group = group or ProcessGroup()
        self.directory, self.monitor, self.count = directory, monitor, count
        self.ranked: list[tuple[float, int]] = []  # cost and step, best first; of equal costs the earlier step first
        self.average: Average | None = None  # the outcome at the run's previous end; None once a validation is better

    def add(self, weights: dict[str, Any], best: bool) -> None:
        """Save the "model", "step" and "scores" of a validation if it is the best so far, or among the best."""
        step, score = weights["step"], weights["scores"][self.monitor]
        if best:
            self._save(self.directory / BEST, weights)
            self.average = None
        if self.count > 1 and math.isfinite(score):
            entry = (cost(self.monitor, score), step)
            self.ranked = sorted([*self.ranked, entry])[: self.count]
            if entry in self.ranked:
                self._save(self._path(step), weights)

    def remove_superseded(self) -> None:
        """Remove checkpoints that are no longer among the best. Call this after saving the checkpoint to resume from: a
        killed run goes back to the previous one, and to the checkpoints that were best then."""
        if self.count > 1 and self.group.is_main:
            wanted = {self._path(step) for _, step in self.ranked}
            for path in set(self.directory.glob(self._path("*").name)) - wanted:
                path.unlink()

    def average_at(
        self, step: int, model: nn.Module, validate: Callable[[], Validation]
    ) -> tuple[dict[str, float], Average] | None:
        """At the end of a run, validate the average, and keep it if it is at least as good as the best validation.

        Returns all scores and the outcome; None if there is nothing to average, or if the run ended here before.
        """
        if self.count == 1 or (self.average is not None and self.average.step == step):
            return None
        self.group.wait()  # until the checkpoints are written
        steps = sorted(step for _, step in self.ranked if self._path(step).is_file())
        if len(steps) < 2:  # noqa: PLR2004
            log.warning("training.average_best=%d: there are no two validations to average", self.count)
            return None
        lowest_cost, best_step = self.ranked[0]
        with swapped_weights(model, mean_weights(self._load(step, model) for step in steps)):
            validation = validate()
            scores = self.group.on_main(lambda: validation.scores)
            score = scores[self.monitor]
            taken = cost(self.monitor, score) <= lowest_cost
            if taken:
                weights = {"model": model.state_dict(), "step": step, "scores": scores, "averaged": steps}
                self._save(self.directory / BEST, weights)
            elif self._path(best_step).is_file():  # best.safetensors may be the average of an earlier end of the run
                self._save(self.directory / BEST, load(self._path(best_step)))
        self.average = Average(step, steps, self.monitor, score, cost(self.monitor, lowest_cost), taken)
        return scores, self.average

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must store: which validations are kept, and the outcome of averaging them."""
        return {"ranked": self.ranked, "average": None if self.average is None else self.average._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict."""
        self.ranked = [(float(score_cost), int(step)) for score_cost, step in state["ranked"]]
        self.average = None if state["average"] is None else Average(**state["average"])
        if any(step < 0 for _, step in self.ranked):  # steps are part of file names
            raise ValueError("a negative step")

    def _save(self, path: Path, weights: dict[str, Any]) -> None:
        if self.group.is_main:
            save(path, weights)

    def _load(self, step: int, model: nn.Module) -> dict[str, Any]:
        weights: dict[str, Any] = load(self._path(step)).get("model", {})
        if not same_form(weights, model.state_dict()):
            raise UserError(f"{self._path(step)}: is the checkpoint of another model; delete it")
        return weights

    def _path(self, step: int | str) -> Path:
        return self.directory / f"step-{step}{Path(BEST).suffix}"


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

    def check(self, _: int = 0) -> None:
        """Raises Interrupted if a signal was received."""
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def saving(self, save: Callable[[], object]) -> Iterator[None]:
        """Record signals within this context and, if one of them ends it, while `save` runs."""
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
        # Ignore the repetition of other signals: when a terminal closes, both the shell and the kernel send SIGHUP.
