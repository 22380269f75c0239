"""Turns gradients into updates: optimizers, schedules, moving averages, the count of skipped updates."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.config.schema.base import Section
from nmt.data.batching import Indices

log = logging.getLogger(__name__)

# Each optimizer is called with the parameters and with the settings of its section, by name.
OPTIMIZERS: dict[type[Section], Callable[..., torch.optim.Optimizer]] = {
    schema.Adam: partial(torch.optim.Adam, fused=True),
    schema.AdamW: partial(torch.optim.AdamW, fused=True),
    schema.SGD: torch.optim.SGD,
    schema.Adadelta: torch.optim.Adadelta,
}


def make_optimizer(config: schema.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Make the configured optimizer of all parameters. Weight decay applies only to matrices: gains, biases and scalars
    set scales and offsets, and are too few to overfit."""
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


@contextmanager
def use_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Load a state dict into the model within this context; at its end, restore the previous values bit for bit. Values
    are copied into the model's tensors: tied parameters stay tied, and cuDNN's parameters stay contiguous."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(weights)
        yield
    finally:
        model.load_state_dict(before)


class MovingAverage:
    """Averages the parameters w_t after each update t   (Polyak and Juditsky 1992).

    The average is exponential, as in Junczys-Dowmunt et al. (2018): a_t = d_t a_{t-1} + (1 - d_t) w_t, with
    d_t = min(decay, (1 + t) / (10 + t)). d_t is small in the first updates, so that a_t forgets the initial parameters
    a_0. Buffers are not averaged. With a decay of 0, nothing is averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        # A tied parameter is listed once. Parameters are float32, whatever the precision of matrix products.
        self.parameters: list[Tensor] = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters to the average after update number `step` (the first update is 1)."""
        if self.decay:
            torch._foreach_lerp_(self.averages, self.parameters, 1 - min(self.decay, (1 + step) / (10 + step)))

    def in_model(self) -> AbstractContextManager[None]:
        """Give the model the averaged parameters within this context; without a decay, change nothing."""
        return use_weights(self.model, self._weights()) if self.decay else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return entries of a checkpoint: "model" holds the parameters to translate with. If these are averages,
        "updated" holds the parameters that training continues from."""
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
        """Make the model's state_dict with averages in place of parameters. Tied parameters share one average."""
        averages: dict[Tensor, Tensor] = dict(zip(self.parameters, self.averages, strict=True))
        return {name: averages.get(tensor, tensor) for name, tensor in self.model.state_dict(keep_vars=True).items()}


class BadUpdates:
    """Counts updates that were skipped because the objective or a gradient was not finite."""

    def __init__(self, most: int, scaler: torch.amp.GradScaler) -> None:
        """most: number of skipped updates in a row that ends the run. With fp16, a skipped update does not count while
        the scaler's scale is above 1, because the next updates use a lower scale, which may prevent the overflow."""
        self.most, self.scaler = most, scaler
        self.count, self.in_a_row = 0, 0

    def add(self, applied: bool, indices: Indices, step: int) -> None:
        """Record whether the update on these training pairs was applied, or skipped. Raises UserError if `most` updates
        in a row were skipped."""
        if applied:
            self.in_a_row = 0
            return
        if self.scaler.is_enabled() and self.scaler.get_scale() > 1:
            return
        self.count += 1
        self.in_a_row += 1
        pairs = ", ".join(map(str, sorted(indices.tolist())))
        log.warning(
            "step %d: non-finite loss or gradient, skipped (pairs %s of the prepared corpus, from 0)", step, pairs
        )
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.in_a_row} non-finite losses or gradients in a row (training.max_bad_steps): start a new run "
                "with a smaller optimizer.lr or training.max_grad_norm, or with precision=fp32; "
                "training.start_from=DIR takes over the weights of this run's best checkpoint"
            )
