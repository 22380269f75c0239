"""Objective, optimizer, schedule, training, validation."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from nmt.config.schema.base import Fraction, Place, Probability, Section


class Likelihood(Section):
    kind: Literal["likelihood"]


class MinimumRisk(Section):
    kind: Literal["minimum_risk"]
    samples: PositiveInt
    reference: bool
    sharpness: PositiveFloat
    likelihood_weight: NonNegativeFloat
    max_ratio: Annotated[float, Field(ge=1.0)]

    @validator(mode="after")
    def _something_to_choose_from(self) -> Self:
        if self.samples == 1 and not self.reference:
            raise ValueError(
                "samples=1 leaves one candidate, with nothing to be better than; set samples=2, or reference=true"
            )
        return self


Objective = Annotated[Likelihood | MinimumRisk, Field(discriminator="kind")]


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
    scheduled_sampling: Fraction
    scheduled_sampling_steps: PositiveInt
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
