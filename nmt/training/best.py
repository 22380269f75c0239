"""The checkpoints of the best validations, and at the end their average."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from nmt.config.errors import UserError
from nmt.model.load import same_form
from nmt.training import checkpoint
from nmt.training.averaging import holding, mean
from nmt.training.stopping import cost
from nmt.training.validation import Validation

log = logging.getLogger(__name__)


class Average(NamedTuple):
    """What came of averaging the best checkpoints."""

    step: int  # when
    steps: list[int]  # of the validations that it averages
    monitor: str
    score: float
    single: float  # that of the best of these validations
    taken: bool  # is it best.pt?


class BestCheckpoints:
    """best.pt and, if more than one is to be averaged, step-STEP.pt of each of the `count` best validations.

    These stay when the run has ended, although each takes as much of the disk as best.pt: a run that is then made
    longer averages the best of all its validations. Whoever needs the space may delete them.
    """

    def __init__(self, directory: Path, monitor: str, count: int) -> None:
        self.directory, self.monitor, self.count = directory, monitor, count
        self.kept: list[tuple[float, int]] = []  # cost and step, the best first; of equal ones the earlier
        self.average: Average | None = None  # at the last end of the run, unless a validation was better since

    def add(self, weights: dict[str, Any], best: bool) -> None:
        """Save "model", "step" and "scores" of a validation where they belong; `best`: of all so far."""
        step, score = weights["step"], weights["scores"][self.monitor]
        if best:
            checkpoint.save(self.directory / "best.pt", weights)
            self.average = None
        if self.count > 1 and math.isfinite(score):
            entry = (cost(self.monitor, score), step)
            self.kept = sorted([*self.kept, entry])[: self.count]
            if entry in self.kept:
                checkpoint.save(self._path(step), weights)

    def tidy(self) -> None:
        """Remove what is no longer among the best. Only once last.pt says so: a kill goes back to what it says."""
        if self.count > 1:
            wanted = {self._path(step) for _, step in self.kept}
            for path in set(self.directory.glob("step-*.pt")) - wanted:
                path.unlink()

    def average_at(
        self, step: int, model: nn.Module, validate: Callable[[], Validation]
    ) -> tuple[dict[str, float], Average] | None:
        """At the end of a run: average, validate, and make it best.pt if it is at least as good as the best single one.

        Returns all scores and the outcome; None if there is nothing to average, or if the run came to this end before.
        """
        if self.count == 1 or (self.average is not None and self.average.step == step):
            return None
        steps = sorted(step for _, step in self.kept if self._path(step).is_file())
        if len(steps) < 2:  # noqa: PLR2004
            log.warning("training.average_best=%d: there are no two validations to average", self.count)
            return None
        least, best_step = self.kept[0]
        with holding(model, mean(self._weights(each, model) for each in steps)):
            scores = validate().scores
            score = scores[self.monitor]
            taken = cost(self.monitor, score) <= least
            if taken:
                weights = {"model": model.state_dict(), "step": step, "scores": scores, "averaged": steps}
                checkpoint.save(self.directory / "best.pt", weights)
            elif self._path(best_step).is_file():  # best.pt may be the average of an end that the run has gone beyond
                checkpoint.save(self.directory / "best.pt", checkpoint.load(self._path(best_step)))
        self.average = Average(step, steps, self.monitor, score, cost(self.monitor, least), taken)
        return scores, self.average

    def state_dict(self) -> dict[str, Any]:
        """All that is not in the configuration."""
        return {"kept": self.kept, "average": None if self.average is None else self.average._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict returned."""
        self.kept = [(float(each), int(step)) for each, step in state["kept"]]
        self.average = None if state["average"] is None else Average(**state["average"])
        if any(step < 0 for _, step in self.kept):  # they are part of file names
            raise ValueError("a checkpoint of a step that is none")

    def _weights(self, step: int, model: nn.Module) -> dict[str, Any]:
        weights: dict[str, Any] = checkpoint.load(self._path(step)).get("model", {})
        if not same_form(weights, model.state_dict()):
            raise UserError(f"{self._path(step)}: is the checkpoint of another model; delete it")
        return weights

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step}.pt"
