"""Which weights a run keeps: a moving average, the best validations' checkpoints, and at the end their average.

Updates circle around a minimum; the mean of several weights is nearer to it than any of them.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.config.schema.training import LOWER_IS_BETTER
from nmt.model.checkpoints import BEST, same_form
from nmt.system.distributed import ProcessGroup
from nmt.training import checkpoint
from nmt.training.validation import Validation

log = logging.getLogger(__name__)


class MovingAverage:
    """a_t = d_t a_{t-1} + (1 - d_t) w_t, d_t = min(decay, (1 + t) / (10 + t)), t the number of the update
    (Polyak and Juditsky 1992; exponential, as in Junczys-Dowmunt et al. 2018). The small d_t of the first updates
    forget the random initial weights a_0.

    Averages parameters; buffers are taken from the model. With a decay of 0, the model's weights are the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        # Each tied parameter once; in float32, whatever the precision of the matrix products.
        self.parameters: list[Tensor] = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after update number `step`, from 1."""
        if self.decay:
            torch._foreach_lerp_(self.averages, self.parameters, 1 - min(self.decay, (1 + step) / (10 + step)))

    def in_model(self) -> AbstractContextManager[None]:
        """Within this context, the model has the average weights."""
        return swapped_weights(self.model, self._weights()) if self.decay else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint: "model" is what was validated, "updated" what further updates continue from."""
        weights = self.model.state_dict()
        return {"model": self._weights(), "updated": weights} if self.decay else {"model": weights}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore model and average from a checkpoint with the entries of state_dict."""
        self.model.load_state_dict(state["model"])
        if self.decay:
            torch._foreach_copy_(self.averages, self.parameters)
            self.model.load_state_dict(state["updated"])

    def _weights(self) -> dict[str, Tensor]:
        """The model's state_dict with its parameters averaged; tied names share a tensor, as in the model."""
        averages: dict[Tensor, Tensor] = dict(zip(self.parameters, self.averages, strict=True))
        return {name: averages.get(own, own) for name, own in self.model.state_dict(keep_vars=True).items()}


@contextmanager
def swapped_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context, the model has these weights; afterwards its own again, bit for bit.

    Values are copied into the model's tensors, so tied parameters stay tied and cuDNN's weights contiguous.
    """
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(own)


def mean_weights(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of at least one model's weights (Junczys-Dowmunt et al. 2016; Vaswani et al. 2017, 6.1)."""
    totals: dict[str, Tensor] = {}
    count = 0
    for model in models:  # only one is in memory at a time
        totals = {name: totals[name] + weight if count else weight.double() for name, weight in model.items()}
        count += 1
    return {name: (total / count).float() for name, total in totals.items()}


def cost(monitor: str, score: float) -> float:
    """The monitored score as a cost, which is lowest for the best validation. (Its own inverse.)"""
    return score if monitor in LOWER_IS_BETTER else -score


class EarlyStopping:
    """Follows the monitored score and ends a run when it has not improved for too long."""

    def __init__(self, monitor: str, patience: int | None) -> None:
        """patience: validations without improvement that end the run; None: never."""
        self.monitor, self.patience = monitor, patience
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # validations since the best one

    def update(self, scores: dict[str, float], step: int) -> bool:
        """Record a validation. Returns whether it is the best so far."""
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
        """The state that is not in the configuration."""
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

    These stay when the run has ended, so that a run which is made longer can average the best of all its validations.
    They can be deleted to save space.
    """

    def __init__(self, directory: Path, monitor: str, count: int, group: ProcessGroup | None = None) -> None:
        """group: processes that all read the checkpoints; the main process writes them."""
        self.group = group or ProcessGroup()
        self.directory, self.monitor, self.count = directory, monitor, count
        self.ranked: list[tuple[float, int]] = []  # cost and step, the best first; the earlier one of equals
        self.average: Average | None = None  # at the last end of the run, unless a validation was better since

    def add(self, weights: dict[str, Any], best: bool) -> None:
        """Save "model", "step" and "scores" of a validation where needed. `best`: is it the best of all so far?"""
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
        """Remove checkpoints that are no longer among the best. Call this after the checkpoint to resume from was
        saved: a killed run goes back to that."""
        if self.count > 1 and self.group.is_main:
            wanted = {self._path(step) for _, step in self.ranked}
            for path in set(self.directory.glob(self._path("*").name)) - wanted:
                path.unlink()

    def average_at(
        self, step: int, model: nn.Module, validate: Callable[[], Validation]
    ) -> tuple[dict[str, float], Average] | None:
        """At the end of a run, validate the average and keep it if it is at least as good as the best single
        validation.

        Returns all scores and the outcome; None if there is nothing to average, or if the run had come to this end
        before.
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
            elif self._path(best_step).is_file():  # the best may be an average of an earlier end of the run
                self._save(self.directory / BEST, checkpoint.load(self._path(best_step)))
        self.average = Average(step, steps, self.monitor, score, cost(self.monitor, lowest_cost), taken)
        return scores, self.average

    def state_dict(self) -> dict[str, Any]:
        """The state that is not in the configuration."""
        return {"ranked": self.ranked, "average": None if self.average is None else self.average._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of state_dict."""
        self.ranked = [(float(each), int(step)) for each, step in state["ranked"]]
        self.average = None if state["average"] is None else Average(**state["average"])
        if any(step < 0 for _, step in self.ranked):  # steps are part of file names
            raise ValueError("a negative step")

    def _save(self, path: Path, weights: dict[str, Any]) -> None:
        if self.group.is_main:
            checkpoint.save(path, weights)

    def _load(self, step: int, model: nn.Module) -> dict[str, Any]:
        weights: dict[str, Any] = checkpoint.load(self._path(step)).get("model", {})
        if not same_form(weights, model.state_dict()):
            raise UserError(f"{self._path(step)}: is the checkpoint of another model; delete it")
        return weights

    def _path(self, step: int | str) -> Path:
        return self.directory / f"step-{step}{Path(BEST).suffix}"
