"""Weights & Biases, MLflow and Aim: each takes curves, sample translations and pictures of a run.

All are extras. Each class raises whatever its package raises.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nmt.config.compose import flatten

MAX_TAG = 64  # characters of a tag of W&B
MAX_PARAMS = 100  # of MLflow, in a request


class Experiment(NamedTuple):
    """The description of a run that a tracker gets at its start."""

    project: str
    name: str
    group: str | None  # the sweep that the run belongs to
    tags: Mapping[str, str]  # overrides of the command line
    config: Mapping[str, Any]
    id: str | None  # the tracker's own, of the run's earlier start


def with_group(experiment: Experiment) -> dict[str, str]:
    """The tags with one for the group, where a tracker has no groups."""
    return {**({} if experiment.group is None else {"sweep": experiment.group}), **experiment.tags}


class Tracker(Protocol):
    """Where a run's progress is kept."""

    id: str  # by which the same run can be continued

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve, by tag such as "train/loss"."""

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        """Add rows of source, reference and hypothesis."""

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        """Add an image of (H, W, 3) RGB pixels."""

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the final scores."""

    def close(self, finished: bool) -> None:
        """Write everything. finished: False for a run that can be resumed."""


class Wandb:
    """Weights & Biases. Steps that a killed run has sent already are not sent again, which W&B sees to."""

    def __init__(self, experiment: Experiment, entity: str | None) -> None:
        import wandb

        self._wandb = wandb
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
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id: str = self._run.id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        table = self._wandb.Table(columns=["source", "reference", "hypothesis"], data=[list(row) for row in rows])
        self._run.log({tag: table}, step=step)

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        self._run.log({tag: self._wandb.Image(array)}, step=step)

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        self._run.summary.update(dict(scores))

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    """MLflow: samples and pictures are artifacts."""

    def __init__(self, experiment: Experiment, uri: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=uri)
        self._sent: dict[str, int] = {}  # the last step of each curve
        self._resumed = experiment.id is not None
        if experiment.id is not None:
            self.id = experiment.id
            self._client.update_run(self.id, status="RUNNING")
            return
        tags = with_group(experiment)
        number = self._experiment(experiment.project)
        self.id = self._client.create_run(number, run_name=experiment.name, tags=tags).info.run_id
        params = [Param(key, str(value)) for key, value in flatten(experiment.config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self.id, params=params[start : start + MAX_PARAMS])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = {tag: value for tag, value in values.items() if step > self._last_step(tag)}
        self._client.log_batch(self.id, metrics=[Metric(tag, value, now, step) for tag, value in new.items()])

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        text = "\n\n".join("\n".join(row) for row in rows)
        self._client.log_text(self.id, f"{text}\n", f"{tag}/{step:08d}.txt")

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        self._client.log_image(self.id, array, key=tag, step=step)

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        self.scalars(step, scores)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def _experiment(self, name: str) -> str:
        """The number of an experiment, which another job of a sweep may be creating too."""
        if self._client.get_experiment_by_name(name) is None:
            with suppress(Exception):
                self._client.create_experiment(name)
        return str(self._client.get_experiment_by_name(name).experiment_id)

    def _last_step(self, tag: str) -> int:
        """A killed run has sent what it logged after its last checkpoint; MLflow would show that twice."""
        if self._resumed and tag not in self._sent:
            history = self._client.get_metric_history(self.id, tag)
            self._sent[tag] = max((point.step for point in history), default=-1)
        return self._sent.get(tag, -1)


class Aim:
    """Aim. What is sent twice for a step replaces itself."""

    def __init__(self, experiment: Experiment, repo: str | None) -> None:
        import aim

        self._aim = aim
        self._run = aim.Run(
            run_hash=experiment.id,
            repo=repo,
            experiment=experiment.project,
            force_resume=experiment.id is not None,  # a killed run has left its lock
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self.id: str = self._run.hash
        self._run["config"] = dict(experiment.config)
        if experiment.id is None:
            self._run.name = experiment.name
            for key, value in with_group(experiment).items():
                self._run.add_tag(f"{key}={value}")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            if math.isfinite(value):  # Aim refuses others
                self._run.track(value, name=tag, step=step)

    def samples(self, tag: str, rows: Sequence[tuple[str, str, str]], step: int) -> None:
        self._run.track([self._aim.Text("\n".join(row)) for row in rows], name=tag, step=step)

    def image(self, tag: str, array: NDArray[np.uint8], step: int) -> None:
        from PIL import Image

        self._run.track(self._aim.Image(Image.fromarray(array)), name=tag, step=step)

    def outcome(self, step: int, scores: Mapping[str, float]) -> None:
        self._run["outcome"] = dict(scores)

    def close(self, finished: bool) -> None:
        self._run.close()
