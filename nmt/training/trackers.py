"""The trackers of a run. Each has its own thread, so that none delays training; a tracker that fails is dropped."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmt.config import schema
from nmt.config.errors import UserError, format_value
from nmt.report.trackers import Aim, Experiment, MLflow, Tracker, Wandb
from nmt.run import NO_EFFECT, SWEEP, RunDirectory, read_json

IDS = "trackers.json"  # in the run's directory: the trackers' own identifiers of the run
MAX_WAITING = 2_000  # records that a tracker has not sent yet
MAX_WAIT = 60.0  # seconds at the end of a run
TENSORBOARD = "tensorboard"  # no tracker: it writes files alone, as part of the run
log = logging.getLogger(__name__)


def check_packages(loggers: Iterable[str]) -> None:
    """Raises UserError if the package of a logger is missing."""
    for name in loggers:
        if find_spec(name) is None:  # each has the name of its package
            raise UserError(f'logger={name}: needs another package: pip install "nmt[{name}]"')


class Background:
    """A Tracker in a thread. The first error, or too slow a connection, is a warning, and the end of the tracker."""

    def __init__(self, name: str, begin: Callable[[], Tracker]) -> None:
        self._name = name
        self._records: Queue[tuple[str, tuple[Any, ...]]] = Queue(MAX_WAITING)
        self._left_out = threading.Event()
        self._thread = threading.Thread(target=self._work, args=[begin], name=name, daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        self._put("scalars", step, dict(values))

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        """See Tracker."""
        self._put("samples", tag, rows, step)

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        """See Tracker."""
        self._put("image", tag, array, step)

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        """See Tracker."""
        self._put("outcome", step, dict(scores))

    def close(self, finished: bool) -> None:
        """Wait until everything is sent, but not longer than MAX_WAIT."""
        self._put("close", finished)
        if not self._left_out.is_set():
            self._thread.join(MAX_WAIT)
            if self._thread.is_alive():
                self._leave_out(f"has not sent everything within {MAX_WAIT:.0f} s")

    def _put(self, *record: Any) -> None:  # noqa: ANN401
        if not self._left_out.is_set():
            try:
                self._records.put_nowait((record[0], record[1:]))
            except Full:
                self._leave_out("is too slow")

    def _work(self, begin: Callable[[], Tracker]) -> None:
        try:
            tracker, method = begin(), ""
            while method != "close" and not self._left_out.is_set():
                method, arguments = self._records.get()
                getattr(tracker, method)(*arguments)
        except (Exception, SystemExit) as error:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._leave_out(f"failed ({format_value(reason, 300)})")

    def _leave_out(self, reason: str) -> None:
        if not self._left_out.is_set():
            self._left_out.set()
            with suppress(OSError):  # of the log file
                log.warning("logger=%s: %s; it is left out from here on", self._name, reason)


def open_trackers(config: schema.TrainConfig, run: RunDirectory) -> list[Background]:
    """Begin or continue the run in each tracker of the configuration."""
    tracking = config.tracking
    makers: dict[str, Callable[[Experiment], Tracker]] = {
        "wandb": partial(Wandb, entity=tracking.wandb_entity),
        "mlflow": partial(MLflow, uri=tracking.mlflow_uri),
        "aim": partial(Aim, repo=tracking.aim_repo),
    }
    names = [name for name in dict.fromkeys(config.logger) if name != TENSORBOARD]
    if not names:
        return []
    ids, lock = read_json(run.path / IDS), threading.Lock()
    path = run.path.resolve()
    sweep = next((folder for folder in path.parents if (folder / SWEEP).is_file()), None)
    experiment = Experiment(
        project=tracking.project,
        name=_name(path) if sweep is None else str(path.relative_to(sweep)),
        group=None if sweep is None else _name(sweep),
        tags={key: format_value(value) for key, value in run.overrides().items() if key not in NO_EFFECT},
        config=config.model_dump(mode="json"),
        id=None,
    )

    def begin(name: str) -> Tracker:
        tracker = makers[name](experiment._replace(id=ids.get(name)))
        with lock:
            run.update_json(run.path / IDS, {name: tracker.id})
        return tracker

    return [Background(name, partial(begin, name)) for name in names]


def _name(path: Path) -> str:
    """Such as 2026-01-31/12-00-00-000000: the last two parts of a path."""
    return "/".join(path.parts[-2:])
