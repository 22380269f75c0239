"""Which validation was the best, and when to give up waiting for a better one."""

import math
from typing import Any


def cost(monitor: str, score: float) -> float:
    """What the best validation has the least of. (Its own inverse.)"""
    return -score if monitor == "bleu" else score


class Stopping:
    """Follows one validation score: BLEU is to rise, loss to fall."""

    def __init__(self, monitor: str, patience: int | None) -> None:
        self.monitor, self.patience = monitor, patience
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # validations since the best one

    def update(self, scores: dict[str, float], step: int) -> bool:
        """Is this validation the best so far?"""
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
        """Has patience run out?"""
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """All that is not in the configuration."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict returned."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
