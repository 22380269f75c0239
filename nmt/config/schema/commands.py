"""The configurations of the commands that use trained runs."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from nmt.config.schema.base import (
    Count,
    CountOrZero,
    Device,
    Models,
    Name,
    Names,
    PathName,
    Paths,
    Processes,
    Section,
    Seed,
    Threads,
)
from nmt.config.schema.search import MAX_HYPOTHESES, BeamSize

SearchPrecision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Values = dict[str, str | int | float | bool | None]


class Loading(Section):
    """How a run is loaded, or several as an ensemble. None: the (first) run's own value."""

    checkpoint: Literal["best", "last"]
    device: Device | None
    precision: SearchPrecision | None
    threads: Threads | None
    seed: Seed | None
    shortlist: PathName | None
    search: Values

    @property
    def load_arguments(self) -> dict[str, Any]:
        """The arguments of Translator.load besides the run."""
        return {name: getattr(self, name) for name in Loading.model_fields}


class SavedRunCommand(Loading):
    """Common values of the commands that load a run, or several as an ensemble."""

    run: Paths
    processes: Processes


class EvaluateConfig(SavedRunCommand):
    """nmt-evaluate."""

    split: Literal["validation", "test"]
    tokenize: Name | None
    lowercase: bool | None
    faithfulness: bool
    faithfulness_sentences: Count
    output: PathName | None

    def conflicts(self) -> Iterator[str]:
        if self.faithfulness and len(self.run) > 1:
            yield "faithfulness=true: gradients are defined for one model, not for an ensemble; name one run"
        if self.output is None and len(self.run) > 1:
            yield "an ensemble's results belong to none of its runs: give output=FOLDER"


class TranslateConfig(SavedRunCommand):
    """nmt-translate."""

    alignments: PathName | None
    references: PathName | None
    constraints: PathName | None
    glossary: PathName | None
    forbidden: PathName | None
    prefix: PathName | None
    nbest: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
    interactive: bool
    buffer_lines: Count
    target_lang: Name | None
    source_lang: Name | None

    def conflicts(self) -> Iterator[str]:
        for key in ("nbest", "constraints", "glossary", "forbidden", "prefix", "shortlist"):
            if self.references is not None and (value := getattr(self, key)) not in {1, None}:
                yield f"references={self.references} are scored without search; leave out {key}={value}"


Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]


class ServeLimits(Section):
    """What clients may ask for."""

    connections: Count
    header_seconds: Seconds
    body_bytes: Count
    body_seconds: Seconds
    request_seconds: Seconds
    request_texts: Count
    queued_sentences: Count
    beam_size: BeamSize


class ServeConfig(Loading):
    """nmt-serve."""

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
    """nmt-export."""

    run: Paths
    output: PathName
    checkpoint: Literal["best", "last"]
    license: Name | None
    sentence: Names | None
    held_out: bool
    overwrite: bool

    def conflicts(self) -> Iterator[str]:
        if len(self.run) > 1:
            yield (
                f"run=[{','.join(self.run)}]: an archive holds one model; export each run, and translate with all "
                "archives: run=[A.nmt,B.nmt]"
            )


Metric = Literal["bleu", "chrf", "ter", "comet"]


class CompareConfig(Section):
    """nmt-compare."""

    runs: Paths
    systems: Names
    split: Literal["validation", "test"]
    baseline: PathName | None
    metric: Metric
    comet_model: Name
    separate_incomparable: bool
    examples: CountOrZero
    sentences: Annotated[list[Count], BeforeValidator(lambda value: [value] if isinstance(value, int) else value)]
    bootstrap_samples: Annotated[int, Field(ge=100, le=1_000_000)]
    randomisation_trials: Annotated[int, Field(ge=100, le=1_000_000)]
    output: PathName
    markdown: bool
