"""Weights & Biases and MLflow, which follow a run beside TensorBoard. Both are extras."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nmt.config import schema
from nmt.config.compose import flatten
from nmt.config.errors import UserError, format_value
from nmt.system.run import NO_EFFECT, SWEEP, RunDirectory, read_json

IDS = "trackers.json"  # in the run's directory: the trackers' own identifiers of the run
TENSORBOARD, WANDB, MLFLOW = "tensorboard", "wandb", "mlflow"
MAX_TAG = 64  # characters of a tag of W&B
MAX_PARAMS = 100  # of MLflow, in a request
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where a run's progress is kept. Its methods raise whatever its package raises."""

    name: str  # as in `logger`
    id: str  # by which a resumed run continues there

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve, by tag such as "train/loss"."""

    def close(self, finished: bool) -> None:
        """Send everything. finished: False for a run that can be resumed."""


class Experiment(NamedTuple):
    """The description of a run that a tracker gets at its start."""

    project: str
    name: str
    group: str | None  # the sweep that the run belongs to
    tags: Mapping[str, str]  # overrides of the command line
    config: Mapping[str, Any]
    alignments: Path  # the folder of heatmaps, which a finished run has
    id: str | None  # the tracker's own, of the run's earlier start


class Wandb:
    """Weights & Biases, which reads what TensorBoard's writer writes from here on."""

    name = WANDB

    def __init__(self, experiment: Experiment, entity: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=experiment.project,
            entity=entity,
            name=experiment.name,
            group=experiment.group,
            tags=[f"{key}={value}"[:MAX_TAG] for key, value in experiment.tags.items()],
            config=dict(experiment.config),
            allow_val_change=True,
            id=experiment.id,
            resume="allow",
            sync_tensorboard=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id: str = self._run.id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing: TensorBoard's files have these points."""

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """MLflow: curves while the run trains, heatmaps at its end. MLflow's own thread sends them."""

    name = MLFLOW

    def __init__(self, experiment: Experiment, uri: str | None) -> None:
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._mlflow, self._alignments = mlflow, experiment.alignments
        self._sending: Any = None  # the last points; those before them are sent first
        if uri is not None:
            mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(experiment.project)
        sweep = {} if experiment.group is None else {"sweep": experiment.group}
        tags = {**sweep, **experiment.tags}
        self.id: str = mlflow.start_run(run_id=experiment.id, run_name=experiment.name, tags=tags).info.run_id
        params = [] if experiment.id is not None else [*flatten(experiment.config)]
        for start in range(0, len(params), MAX_PARAMS):
            mlflow.log_params(dict(params[start : start + MAX_PARAMS]))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._sending = self._mlflow.log_metrics(dict(values), step=step, synchronous=False)

    def close(self, finished: bool) -> None:
        try:
            if self._sending is not None:
                self._sending.wait()
            if finished and self._alignments.is_dir():
                self._mlflow.log_artifacts(str(self._alignments), self._alignments.name)
        finally:
            self._mlflow.end_run("FINISHED" if finished else "KILLED")


def check_packages(loggers: Iterable[str]) -> None:
    """Raises UserError if the package of a logger is missing."""
    for name in loggers:
        if find_spec(name) is None:  # a tracker is named after its package
            raise UserError(f'logger={name}: needs another package: pip install "nmt[{name}]"')


def writes_tensorboard(loggers: Sequence[str]) -> bool:
    """Does a run with these loggers write TensorBoard's files? W&B reads them."""
    return TENSORBOARD in loggers or WANDB in loggers


def open_trackers(config: schema.TrainConfig, run: RunDirectory) -> list[Tracker]:
    """Begin or continue the run in each tracker, before TensorBoard's files are opened. Raises UserError if a tracker
    refuses it."""
    tracking, ids, path = config.tracking, read_json(run.path / IDS), run.path.resolve()
    sweep = next((folder for folder in path.parents if (folder / SWEEP).is_file()), None)
    experiment = Experiment(
        project=tracking.project,
        name=_name(path) if sweep is None else str(path.relative_to(sweep)),
        group=None if sweep is None else _name(sweep),
        tags={key: format_value(value) for key, value in run.overrides().items() if key not in NO_EFFECT},
        config=config.model_dump(mode="json"),
        alignments=run.alignments,
        id=None,
    )
    trackers: list[Tracker] = []
    for name in dict.fromkeys(config.logger):
        described = experiment._replace(id=ids.get(name))
        try:
            if name == WANDB:
                trackers.append(Wandb(described, tracking.wandb_entity))
            elif name == MLFLOW:
                trackers.append(MLflow(described, tracking.mlflow_uri))
        except (Exception, SystemExit) as error:
            close_trackers(trackers, finished=False)
            raise UserError(f"logger={name}: cannot be used ({_reason(error)}); train without it") from None
    if trackers:
        run.update_json(run.path / IDS, {tracker.name: tracker.id for tracker in trackers})
    return trackers


def close_trackers(trackers: Iterable[Tracker], finished: bool) -> None:
    """Send everything. A tracker that fails now is a warning: the run itself is complete."""
    for tracker in trackers:
        try:
            tracker.close(finished)
        except (Exception, SystemExit) as error:
            log.warning("logger=%s: does not have the whole run (%s)", tracker.name, _reason(error))


def _reason(error: BaseException) -> str:
    return format_value(next(iter(str(error).splitlines()), "") or type(error).__name__, 300)


def _name(path: Path) -> str:
    """Such as 2026-01-31/12-00-00-000000: the last two parts of a path."""
    return "/".join(path.parts[-2:])
