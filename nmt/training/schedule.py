"""Learning rate schedules: a factor of the optimizer's learning rate."""

import math
from bisect import bisect_right
from itertools import accumulate

from nmt.config import schema
from nmt.config.errors import UserError


class Schedule:
    """factor(step) in [0, 1]: linear warm-up to 1, then what the configuration says."""

    def __init__(self, config: schema.Schedule, total_steps: int) -> None:
        """`total_steps`: where a cosine ends. Raises UserError if it has more cycles than there are updates for."""
        self.config = config
        self.restarts = _restarts(config, total_steps) if isinstance(config, schema.CosineSchedule) else []
        self.reduction = 1.0  # of a plateau schedule so far
        self.waited = 0  # validations without improvement since the last reduction

    def factor(self, step: int) -> float:
        """For the update number `step`, from 1; 0 before the first."""
        config = self.config
        warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
        since = max(0, step - config.warmup_steps)
        match config:
            case schema.ConstantSchedule():
                return warmup
            case schema.InverseSqrtSchedule():
                return warmup * math.sqrt(config.warmup_steps / max(step, config.warmup_steps))
            case schema.CosineSchedule():
                cycle = bisect_right(self.restarts, since, hi=config.cycles) - 1
                start, end = self.restarts[cycle : cycle + 2]
                progress = min(1.0, (since - start) / (end - start))
                share = 0.5 * (1 + math.cos(math.pi * progress))
                return warmup * (config.min_factor + (1 - config.min_factor) * share)
            case schema.StepSchedule():
                drops = 0 if step <= config.start else 1 + (step - config.start - 1) // config.every
                return float(warmup * config.factor**drops)
            case schema.PlateauSchedule():
                return warmup * self.reduction

    def observe(self, improved: bool) -> None:
        """Tell a plateau schedule how a validation went."""
        if not isinstance(self.config, schema.PlateauSchedule):
            return
        self.waited = 0 if improved else self.waited + 1
        if self.waited > self.config.patience:
            self.reduction = max(self.config.min_factor, self.reduction * self.config.factor)
            self.waited = 0

    def state_dict(self) -> dict[str, float | int]:
        """All that is not in the configuration."""
        return {"reduction": self.reduction, "waited": self.waited}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """What state_dict returned."""
        self.reduction, self.waited = float(state["reduction"]), int(state["waited"])


def _restarts(config: schema.CosineSchedule, total_steps: int) -> list[int]:
    """Updates after the warm-up at which each cycle begins, and the last one's end (Loshchilov and Hutter 2017:
    T_i = T_0 T_mult^i, here with the T_0 that ends them with the run)."""
    cycles, updates = config.cycles, max(1, total_steps - config.warmup_steps)
    if cycles <= updates:
        lengths = [config.cycle_growth ** (cycle + 1 - cycles) for cycle in range(cycles)]  # of the last one's
        ends = list(accumulate(lengths))
        if updates * ends[0] / ends[-1] >= 1:
            return [0, *(round(updates * end / ends[-1]) for end in ends)]
    raise UserError(
        f"schedule.cycles={cycles}: the first cycle would get less than one of the {updates} updates after the "
        "warm-up; take fewer cycles or a smaller schedule.cycle_growth"
    )
