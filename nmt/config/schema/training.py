"""Optimizer, schedule, training, validation."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nmt.config.schema.base import Fraction, Place, Probability, Section


class Adam(Section):
    kind: Literal["adam", "adamw"]
    lr: PositiveFloat
    betas: tuple[Probability, Probability] = Field(strict=False)
    eps: PositiveFloat
    weight_decay: NonNegativeFloat


class SGD(Section):
    kind: Literal["sgd"]
    lr: PositiveFloat
    momentum: Probability
    weight_decay: NonNegativeFloat


class Adadelta(Section):
    kind: Literal["adadelta"]
    lr: PositiveFloat
    rho: Probability
    eps: PositiveFloat
    weight_decay: NonNegativeFloat


Optimizer = Annotated[Adam | SGD | Adadelta, Field(discriminator="kind")]


class ConstantSchedule(Section):
    kind: Literal["constant"]
    warmup_steps: NonNegativeInt


class InverseSqrtSchedule(Section):
    kind: Literal["inverse_sqrt"]
    warmup_steps: PositiveInt


class CosineSchedule(Section):
    kind: Literal["cosine"]
    warmup_steps: NonNegativeInt
    min_factor: Fraction
    cycles: PositiveInt
    cycle_growth: Annotated[float, Field(ge=1.0)]


class StepSchedule(Section):
    kind: Literal["step"]
    warmup_steps: NonNegativeInt
    start: NonNegativeInt
    every: PositiveInt
    factor: Fraction


class PlateauSchedule(Section):
    kind: Literal["plateau"]
    warmup_steps: NonNegativeInt
    factor: Fraction
    patience: NonNegativeInt
    min_factor: Fraction


Schedule = Annotated[
    ConstantSchedule | InverseSqrtSchedule | CosineSchedule | StepSchedule | PlateauSchedule,
    Field(discriminator="kind"),
]


class Training(Section):
    start_from: Place | None
    max_epochs: PositiveInt
    max_steps: PositiveInt | None
    batch_tokens: PositiveInt
    batch_sentences: PositiveInt | None
    accumulate: PositiveInt
    label_smoothing: Probability
    r_drop: NonNegativeFloat
    guided_alignment: NonNegativeFloat
    max_grad_norm: PositiveFloat | None
    max_bad_steps: PositiveInt
    log_every: PositiveInt
    checkpoint_every: PositiveInt | None
    ema_decay: Probability
    average_best: PositiveInt


class Validation(Section):
    every: PositiveInt
    unit: Literal["epochs", "steps"]
    monitor: Literal["bleu", "loss"]
    patience: PositiveInt | None
    samples: NonNegativeInt
    saliency: bool
