"""Sections for objective, optimizer, learning-rate schedule, training, validation and search."""

from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import (
    BY_KIND,
    Conflict,
    Count,
    CountOrZero,
    Fraction,
    Meaning,
    Name,
    NonNegative,
    PathName,
    Paths,
    Positive,
    Probability,
    Section,
    one_as_list,
)

Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]  # added to a divisor; a smaller value can become 0 in float32


class Likelihood(Section):
    kind: Literal["likelihood"]


class Distillation(Section):
    kind: Literal["distillation"]
    teachers: Paths
    teacher_weight: Annotated[float, Field(gt=0.0, le=1.0)]


Objective = Annotated[Likelihood | Distillation, BY_KIND]


class AnyAdam(Section):
    lr: Positive
    betas: tuple[Probability, Probability] = Field(strict=False)
    eps: Epsilon
    weight_decay: NonNegative


class Adam(AnyAdam):
    kind: Literal["adam"]


class AdamW(AnyAdam):
    kind: Literal["adamw"]


class SGD(Section):
    kind: Literal["sgd"]
    lr: Positive
    momentum: Probability
    weight_decay: NonNegative


class Adadelta(Section):
    kind: Literal["adadelta"]
    lr: Positive
    rho: Probability
    eps: Epsilon
    weight_decay: NonNegative


Optimizer = Annotated[Adam | AdamW | SGD | Adadelta, BY_KIND]


class ConstantSchedule(Section):
    kind: Literal["constant"]
    warmup_steps: CountOrZero


class InverseSqrtSchedule(Section):
    kind: Literal["inverse_sqrt"]
    warmup_steps: Count


class CosineSchedule(Section):
    kind: Literal["cosine"]
    warmup_steps: CountOrZero
    min_factor: Fraction


class StepSchedule(Section):
    kind: Literal["step"]
    warmup_steps: CountOrZero
    start: CountOrZero
    every: Count
    factor: Fraction


class PlateauSchedule(Section):
    kind: Literal["plateau"]
    warmup_steps: CountOrZero
    factor: Fraction
    patience: CountOrZero
    min_factor: Fraction


Schedule = Annotated[ConstantSchedule | InverseSqrtSchedule | CosineSchedule | StepSchedule | PlateauSchedule, BY_KIND]


class Training(Section):
    start_from: PathName | None
    max_epochs: Annotated[Count, Meaning.LENGTH]
    max_steps: Annotated[Count | None, Meaning.LENGTH]
    batch_tokens: Count
    batch_sentences: Count | None
    accumulate: Count
    label_smoothing: Probability
    r_drop: NonNegative
    guided_alignment: NonNegative
    max_grad_norm: Positive | None
    max_bad_steps: Count
    # Limited, because a checkpoint stores the sums of all updates since the last line of the log.
    log_every: Annotated[int, Field(gt=0, le=10_000), Meaning.NO_EFFECT]
    checkpoint_every: Annotated[Count | None, Meaning.NO_EFFECT]
    cuda_graphs: Annotated[CountOrZero, Meaning.NO_EFFECT]
    ema_decay: Probability


Logger = Literal["tensorboard", "wandb"]
Loggers = Annotated[list[Logger], one_as_list]


class Validation(Section):
    every: Count
    unit: Literal["epochs", "steps"]
    monitor: Name  # a key of nmt.evaluate.metrics.METRICS, which imports the schema, or loss or aer
    patience: Annotated[Count | None, Meaning.LENGTH]
    samples: Annotated[CountOrZero, Meaning.DISPLAY]
    saliency: Annotated[bool, Meaning.DISPLAY]


MAX_HYPOTHESES = 10_000  # per sentence in a search; each needs memory for a decoder state
BeamSize = Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
LengthPenalty = Literal["none", "average", "gnmt"]
LengthExponent = Annotated[float, Field(ge=0.0, le=10.0)]


class SearchLimits(Section):
    """Common values of all search methods. Lengths count tokens, `</s>` included."""

    conflicts = Conflict.each(
        "min_length needs a limit that is at least as large, but max_length; lower min_length or raise max_length",
        when=lambda search: search.min_length > search.max_length,
    )

    min_length: CountOrZero
    max_length: Count
    max_ratio: Positive
    max_source_length: Count
    batch_tokens: Count
    replace_unknown: bool


class Greedy(SearchLimits):
    kind: Literal["greedy"]


class Beam(SearchLimits):
    kind: Literal["beam"]
    beam_size: BeamSize
    length_penalty: LengthPenalty
    alpha: LengthExponent
    coverage_penalty: NonNegative
    stop: Literal["beam", "exact"]


class Sampling(SearchLimits):
    kind: Literal["sampling"]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


class MinimumBayesRisk(SearchLimits):
    kind: Literal["mbr"]
    candidates: Literal["sampling", "beam"]
    n_candidates: BeamSize
    utility: Literal["chrf", "bleu"]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


Search = Annotated[Greedy | Beam | Sampling | MinimumBayesRisk, BY_KIND]


class OptunaSettings(Section):
    """The search for hyperparameters (configs/hydra/sweeper/optuna.yaml)."""

    n_trials: Count
    n_jobs: Count | None
    sampler: Literal["tpe", "random"]
    pruner: Literal["median", "halving", "none"]
    startup_trials: CountOrZero
