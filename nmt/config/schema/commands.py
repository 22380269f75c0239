"""The configurations of the six commands, made of the sections of the other modules in this folder."""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from nmt.config.errors import CONTROL, UserError, format_value, user_path
from nmt.config.schema.base import (
    Conflict,
    Count,
    CountOrZero,
    Meaning,
    Name,
    Names,
    PathName,
    Paths,
    Section,
    element,
    fields,
    keys_with,
    means,
    one_as_list,
)
from nmt.config.schema.data import Data, TokenizerConfig
from nmt.config.schema.model import Model, Size
from nmt.config.schema.training import (
    MAX_HYPOTHESES,
    BeamSize,
    Loggers,
    Objective,
    Optimizer,
    Schedule,
    Search,
    Training,
    Validation,
)

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Processes = Annotated[int, Field(gt=0, le=1024)]
Threads = Annotated[int, Field(gt=0, le=1024)]  # torch crashes with 100,000 threads
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Metrics = Annotated[Names, Field(min_length=1)]  # keys of nmt.evaluate.metrics.METRICS


class Machine(Section):
    device: Annotated[Device, Meaning.NO_EFFECT]
    precision: Precision
    threads: Annotated[Threads | None, Meaning.NO_EFFECT]


class Evaluation(Section):
    metrics: Metrics
    tokenize: Name
    lowercase: bool


class TrainConfig(Model, Machine):
    """Configuration of nmt-train."""

    run: Annotated[PathName | None, Meaning.NO_EFFECT]
    seed: Seed
    processes: Annotated[Processes, Meaning.NO_EFFECT]
    size: Size
    data: Data
    tokenizer: TokenizerConfig
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    training: Training
    validation: Validation
    logger: Annotated[Loggers, Meaning.NO_EFFECT]
    search: Search
    evaluation: Evaluation

    def with_absolute_paths(self) -> Self:
        """Return a copy with absolute paths, so that a run can be resumed from any directory."""
        values = with_paths(type(self), self.model_dump(), absolute_path)
        return self.model_validate({**values, "run": None})

    conflicts = (
        *Model.conflicts,
        *Conflict.each(
            *(
                f"{key}=true needs one vocabulary for both languages, but {separate}; {remedy}, or {key}=false"
                for key in ("embedding.tie_source_target", "decoder.copy")
                for separate, remedy in (
                    ("tokenizer.kind=sides", "use another tokenizer, such as tokenizer=bpe"),
                    ("tokenizer.target_model!=null", "leave out tokenizer.target_model"),
                )
            ),
            "training.guided_alignment>0 needs an attention, but attention.kind=none; set it to 0",
            "validation.monitor=aer needs an attention, but attention.kind=none; monitor bleu or loss",
            "search.coverage_penalty>0 needs an attention, but attention.kind=none; set it to 0",
            "training.guided_alignment>0 needs the logarithms of the weights, "
            "but attention.normalizer.gives_log_weights=false; set it to 0, or use attention/normalizer=softmax",
            "attention.normalizer.kind=fertility needs a score of all source positions, "
            "but attention.score.kind=location; use attention/score=general, or attention/normalizer=softmax",
            *(
                f"{key} needs the corpus's word alignments, but {data}; "
                f"give data=files with data.alignments, or {remedy}"
                for key, remedy in (
                    ("training.guided_alignment>0", "set it to 0"),
                    ("validation.monitor=aer", "monitor bleu or loss"),
                )
                for data in ("data.kind=hub|multilingual", "data.kind=files and data.alignments=null")
            ),
            "training.r_drop>0 needs two passes that train on the same positions, "
            "but attention.alignment.kind=sampled|variational; set it to 0, or use attention/alignment=expected",
            "objective.kind=distillation needs positions that need no reward, but attention.alignment.kind=sampled; "
            "use objective=likelihood, or attention/alignment=straight_through",
            "training.r_drop>0 needs objective=likelihood, but objective.kind!=likelihood; set it to 0",
        ),
    )


def absolute_path(path: str) -> str:
    """Return the path from the root. Raises UserError if the working directory's name is not UTF-8 text."""
    absolute = os.path.abspath(user_path(path))
    if CONTROL.search(absolute):
        raise UserError(
            f"{format_value(absolute)}: holds control characters or bytes that are not UTF-8, which a configuration "
            "cannot hold; rename the folder, or start the command in another one (in a UTF-8 locale)"
        )
    return absolute


def with_paths(annotation: Any, value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401
    """Return a copy of plain values, typed by the annotation, with `change` applied to every path in them."""
    if isinstance(value, Mapping):
        sections = fields(annotation, value)
        return {key: with_paths(sections.get(key), part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [with_paths(element(annotation), part, change) for part in value]
    return change(value) if isinstance(value, str) and means(annotation, Meaning.PATH) else value


PATH_KEYS = keys_with(TrainConfig, Meaning.PATH) - {"run"}
NO_EFFECT_KEYS = keys_with(TrainConfig, Meaning.NO_EFFECT)
LENGTH_KEYS = keys_with(TrainConfig, Meaning.LENGTH)
# Keys that a user may change when a run is resumed.
CHANGEABLE_KEYS = PATH_KEYS | NO_EFFECT_KEYS | LENGTH_KEYS | keys_with(TrainConfig, Meaning.DISPLAY)


SearchPrecision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Values = dict[str, str | int | float | bool | None]


class Loading(Section):
    """How to load a run, or several runs as an ensemble.

    Where a value is None, the value that the run was trained with applies; in an ensemble, that of the first run.
    """

    checkpoint: Literal["best", "last"]
    device: Device | None
    precision: SearchPrecision | None
    threads: Threads | None
    seed: Seed | None
    shortlist: PathName | None
    search: Values

    @property
    def load_arguments(self) -> dict[str, Any]:
        """These values as keyword arguments of Translator.load."""
        return {name: getattr(self, name) for name in Loading.model_fields}


class SavedRunCommand(Loading):
    """Common values of nmt-evaluate and nmt-translate, which load one run, or several runs as one ensemble."""

    run: Paths
    processes: Processes


class EvaluateConfig(SavedRunCommand):
    """Configuration of nmt-evaluate."""

    split: Literal["validation", "test"]
    metrics: Metrics | None
    tokenize: Name | None
    lowercase: bool | None
    output: PathName | None


CONTROLS = ("constraints", "glossary", "forbidden", "prefix")  # keys that name files which control a search


class TranslateConfig(SavedRunCommand):
    """Configuration of nmt-translate."""

    alignments: PathName | None
    references: PathName | None
    constraints: PathName | None
    glossary: PathName | None
    forbidden: PathName | None
    prefix: PathName | None
    nbest: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
    interactive: bool
    buffer_lines: Count

    conflicts = Conflict.each(
        *(
            f"{key}{given} needs a search, which scores of references do without, but references!=null; leave out {key}"
            for key, given in (("nbest", ">1"), *((name, "!=null") for name in (*CONTROLS, "shortlist")))
        )
    )


# The models of nmt-serve: each is a run, a list of runs that form an ensemble, or a folder with several runs below it.
Models = Annotated[list[Paths], Field(min_length=1), one_as_list]
Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]


class ServeLimits(Section):
    """Limits on connections and requests of clients."""

    connections: Count
    body_bytes: Count
    request_seconds: Seconds
    request_texts: Count
    queued_sentences: Count
    beam_size: BeamSize


class ServeConfig(Loading):
    """Configuration of nmt-serve."""

    run: Models
    host: Name
    port: Port
    token: Name | None
    hosts: Names
    workers: Threads | None
    batch_wait_seconds: Annotated[float, Field(ge=0.0, le=10.0)]
    log_requests: bool
    limits: ServeLimits


class ExportConfig(Section):
    """Configuration of nmt-export."""

    run: Paths
    output: PathName
    checkpoint: Literal["best", "last"]
    license: Name | None
    sentence: Names | None
    held_out: bool
    precision: Literal["fp32", "fp16"]
    overwrite: bool

    conflicts = Conflict.each(
        "run needs to be one model, as an archive holds one; export each, and use all archives: run=[A.nmt,B.nmt]",
        when=lambda config: len(config.run) > 1,
    )


class CompareConfig(Section):
    """Configuration of nmt-compare."""

    runs: Paths
    systems: Names
    split: Literal["validation", "test"]
    baseline: PathName | None
    metric: Name | None
    examples: CountOrZero
    sentences: Annotated[list[Count], one_as_list]
    bootstrap_samples: Annotated[int, Field(ge=100, le=1_000_000)]
    randomisation_trials: Annotated[int, Field(ge=100, le=1_000_000)]
    output: PathName
    markdown: bool
