"""Optimizers, and schedules of the learning rate."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from nmt.config.schema import training as schema
from nmt.config.schema.base import Section

# Each optimizer is called with the parameters and with the settings of its section, by name.
OPTIMIZERS: dict[type[Section], Callable[..., torch.optim.Optimizer]] = {
    schema.Adam: partial(torch.optim.Adam, fused=True),
    schema.AdamW: partial(torch.optim.AdamW, fused=True),
    schema.SGD: torch.optim.SGD,
    schema.Adadelta: torch.optim.Adadelta,
}


def make_optimizer(config: schema.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Make the configured optimizer of all parameters.

    Weight decay applies only to matrices: gains, biases and scalars set scales and offsets, and are too few to overfit.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    parameters: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return OPTIMIZERS[type(config)](parameters, **config.model_dump(exclude={"kind"}))


class Schedule:
    """Gives a factor of the learning rate, in [0, 1], for each update: a linear warm-up to 1, then 1."""

    def __init__(self, warmup_steps: int, total_steps: int) -> None:
        """warmup_steps: number of updates of the warm-up; total_steps: number of the last update."""
        self.warmup_steps, self.total_steps = warmup_steps, total_steps

    def factor(self, step: int) -> float:
        """Return the factor for update number `step`; `step` is 1 in the first update, and 0 before it."""
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return warmup * self.decay(step)

    def decay(self, step: int) -> float:
        """Return the factor without the warm-up."""
        return 1.0

    def observe(self, improved: bool) -> None:
        """Record whether a validation improved; most schedules ignore validations."""

    def state_dict(self) -> dict[str, float | int]:
        """Return what a checkpoint must store."""
        return {}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore the result of state_dict."""


class InverseSqrtSchedule(Schedule):
    """Falls with the square root of the number of updates   (Vaswani et al. 2017, 5.3)."""

    def decay(self, step: int) -> float:
        return math.sqrt(self.warmup_steps / max(step, self.warmup_steps))


class CosineSchedule(Schedule):
    """Falls along half a cosine to `min_factor` at the last update   (Loshchilov and Hutter 2017, eq. 5, without
    restarts)."""

    def __init__(self, warmup_steps: int, total_steps: int, min_factor: float) -> None:
        super().__init__(warmup_steps, total_steps)
        self.min_factor = min_factor

    def decay(self, step: int) -> float:
        since_warmup = max(0, step - self.warmup_steps)
        progress = min(1.0, since_warmup / max(1, self.total_steps - self.warmup_steps))
        height = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_factor + (1 - self.min_factor) * height


class StepSchedule(Schedule):
    """Multiplies the rate by `factor` after update number `start`, and again after every `every` updates   (Luong et
    al. 2015, 4.1)."""

    def __init__(self, warmup_steps: int, total_steps: int, start: int, every: int, factor: float) -> None:
        super().__init__(warmup_steps, total_steps)
        self.start, self.every, self.drop = start, every, factor

    def decay(self, step: int) -> float:
        drops = 0 if step <= self.start else 1 + (step - self.start - 1) // self.every
        return float(self.drop**drops)


class PlateauSchedule(Schedule):
    """Multiplies the rate by `factor`, down to `min_factor`, after more than `patience` validations in a row without
    improvement."""

    def __init__(self, warmup_steps: int, total_steps: int, factor: float, patience: int, min_factor: float) -> None:
        super().__init__(warmup_steps, total_steps)
        self.drop, self.patience, self.min_factor = factor, patience, min_factor
        self.reduction = 1.0  # the factor after the reductions so far
        self.waited = 0  # number of validations since the last one that improved, or since the last reduction

    def decay(self, step: int) -> float:
        return self.reduction

    def observe(self, improved: bool) -> None:
        self.waited = 0 if improved else self.waited + 1
        if self.waited > self.patience:
            self.reduction, self.waited = max(self.min_factor, self.reduction * self.drop), 0

    def state_dict(self) -> dict[str, float | int]:
        return {"reduction": self.reduction, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        self.reduction, self.waited = float(state["reduction"]), int(state["waited"])


SCHEDULES: dict[type[Section], Callable[..., Schedule]] = {
    schema.ConstantSchedule: Schedule,
    schema.InverseSqrtSchedule: InverseSqrtSchedule,
    schema.CosineSchedule: CosineSchedule,
    schema.StepSchedule: StepSchedule,
    schema.PlateauSchedule: PlateauSchedule,
}


def make_schedule(config: schema.Schedule, total_steps: int) -> Schedule:
    """Make the configured schedule of a run whose last update has the number `total_steps`."""
    return SCHEDULES[type(config)](total_steps=total_steps, **config.model_dump(exclude={"kind"}))
