"""The optimizer and the schedule of its learning rate."""

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from nmt.config.errors import UserError
from nmt.config.schema import training as schema


def make_optimizer(config: schema.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The configured optimizer over all parameters that are not frozen.

    Only matrices are decayed: gains, biases and scalars set the size of something and are too few to overfit.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    parameters: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    options = config.model_dump(exclude={"kind"})
    match config:
        case schema.Adam():
            kind = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
            return kind(parameters, **options, fused=True)
        case schema.SGD():
            return torch.optim.SGD(parameters, **options)
        case schema.Adadelta():
            return torch.optim.Adadelta(parameters, **options)


class Schedule:
    """factor(step) in [0, 1] of the learning rate: linear warm-up to 1, then as configured."""

    def __init__(self, config: schema.Schedule, total_steps: int) -> None:
        """total_steps: the end of a cosine. Raises UserError if it has more cycles than updates."""
        self.config = config
        self.restarts = _restarts(config, total_steps) if isinstance(config, schema.CosineSchedule) else []
        self.reduction = 1.0  # of a plateau schedule so far
        self.waited = 0  # validations without improvement since the last reduction

    def factor(self, step: int) -> float:
        """The factor of the learning rate in update number `step`, from 1; 0 before the first."""
        config = self.config
        warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
        since_warmup = max(0, step - config.warmup_steps)
        match config:
            case schema.ConstantSchedule():
                return warmup
            case schema.InverseSqrtSchedule():
                return warmup * math.sqrt(config.warmup_steps / max(step, config.warmup_steps))
            case schema.CosineSchedule():
                cycle = bisect_right(self.restarts, since_warmup, hi=config.cycles) - 1
                start, end = self.restarts[cycle : cycle + 2]
                progress = min(1.0, (since_warmup - start) / (end - start))
                height = 0.5 * (1 + math.cos(math.pi * progress))
                return warmup * (config.min_factor + (1 - config.min_factor) * height)
            case schema.StepSchedule():
                drops = 0 if step <= config.start else 1 + (step - config.start - 1) // config.every
                return float(warmup * config.factor**drops)
            case schema.PlateauSchedule():
                return warmup * self.reduction

    def observe(self, improved: bool) -> None:
        """Reduce the factor of a plateau schedule if too many validations have not improved."""
        if not isinstance(self.config, schema.PlateauSchedule):
            return
        self.waited = 0 if improved else self.waited + 1
        if self.waited > self.config.patience:
            self.reduction = max(self.config.min_factor, self.reduction * self.config.factor)
            self.waited = 0

    def state_dict(self) -> dict[str, float | int]:
        """The state that is not in the configuration."""
        return {"reduction": self.reduction, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore the result of state_dict."""
        self.reduction, self.waited = float(state["reduction"]), int(state["waited"])


def _restarts(config: schema.CosineSchedule, total_steps: int) -> list[int]:
    """The updates after the warm-up at which each cycle starts, and the end of the last (Loshchilov and Hutter 2017:
    T_i = T_0 T_mult^i, here with the T_0 that ends the last cycle with the run)."""
    cycles, updates = config.cycles, max(1, total_steps - config.warmup_steps)
    if cycles <= updates:
        lengths = [config.cycle_growth ** (cycle + 1 - cycles) for cycle in range(cycles)]  # relative to the last
        ends = list(accumulate(lengths))
        if updates * ends[0] / ends[-1] >= 1:
            return [0, *(round(updates * end / ends[-1]) for end in ends)]
    raise UserError(
        f"schedule.cycles={cycles}: the first cycle would get less than one of the {updates} updates after the "
        "warm-up; take fewer cycles or a smaller schedule.cycle_growth"
    )
