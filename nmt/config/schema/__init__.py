"""Search, evaluation, and the configuration of each command. The other modules here define its sections."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from nmt.config.overrides import user_path
from nmt.config.schema.base import (
    Count,
    CountOrZero,
    Models,
    Name,
    Names,
    PathName,
    Paths,
    Positive,
    Section,
    Seed,
    Threads,
)
from nmt.config.schema.data import Data, TokenizerConfig
from nmt.config.schema.model import Model, Size
from nmt.config.schema.training import Objective, Optimizer, Schedule, Training, Validation

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
SearchPrecision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Processes = Annotated[int, Field(gt=0, le=1024)]
Values = dict[str, str | int | float | bool | None]


class Machine(Section):
    device: Device
    precision: Precision
    threads: Threads | None


MAX_HYPOTHESES = 10_000  # of a sentence at once; each has its own decoder state


class SearchLimits(Section):
    """Common values of all searches. Lengths are in tokens, including `</s>`."""

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
    beam_size: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
    length_penalty: Literal["none", "average", "gnmt"]
    alpha: Annotated[float, Field(ge=0.0, le=100.0)]
    stop: Literal["beam", "exact"]


class Sampling(SearchLimits):
    kind: Literal["sampling"]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


Search = Annotated[Greedy | Beam | Sampling, Field(discriminator="kind")]


class Evaluation(Section):
    tokenize: Name
    lowercase: bool


PATH_FIELDS = {"path", "train", "validation", "test", "extra", "cache_dir", "source_model", "target_model"}
PATH_FIELDS |= {"teachers", "start_from"}


def _absolute(path: str | list[str]) -> str | list[str]:
    return os.path.abspath(user_path(path)) if isinstance(path, str) else [os.path.abspath(user_path(p)) for p in path]


class TrainConfig(Model, Machine):
    """nmt-train."""

    run: PathName | None
    seed: Seed
    processes: Processes
    size: Size
    data: Data
    tokenizer: TokenizerConfig
    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    training: Training
    validation: Validation
    search: Search
    evaluation: Evaluation

    def with_absolute_paths(self) -> Self:
        """The same with absolute paths, so that a run can be resumed from any directory."""
        sections = {}
        for name in ("data", "tokenizer", "objective", "training"):
            section = getattr(self, name)
            paths = {key: _absolute(value) for key, value in section if key in PATH_FIELDS and value is not None}
            sections[name] = section.model_copy(update=paths)
        return self.model_copy(update={**sections, "run": None})

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        tokenizer = self.tokenizer
        shared = tokenizer.joint if tokenizer.kind != "file" else tokenizer.target_model is None
        if self.embedding.tie_source_target and not shared:
            yield (
                "embedding.tie_source_target=true needs one vocabulary for both languages; "
                "set tokenizer.joint=true (or one tokenizer model), or embedding.tie_source_target=false"
            )
        if self.training.guided_alignment:
            yield from self._conflicts_of_guided_alignment()
        yield from self._conflicts_of_objective()

    def _conflicts_of_guided_alignment(self) -> Iterator[str]:
        if self.attention.kind == "none":
            yield "training.guided_alignment guides an attention, but attention.kind=none; set it to 0"
        elif self.attention.normalizer.kind not in {"softmax", "linear_chain", "monotonic", "mocha"}:
            yield (
                "training.guided_alignment has no gradient through the exact zeros of "
                f"attention.normalizer.kind={self.attention.normalizer.kind}; set it to 0, or use "
                "attention/normalizer=softmax"
            )
        if self.data.kind == "hub" or (self.data.kind == "files" and self.data.alignments is None):
            yield (
                "training.guided_alignment needs the training corpus's word alignments: data=files with data.alignments"
            )

    def _conflicts_of_objective(self) -> Iterator[str]:
        alignment = self.attention.alignment.kind if self.attention.kind == "attention" else "none"
        kind = self.objective.kind
        if self.training.r_drop and alignment in {"sampled", "variational"}:
            yield (
                f"training.r_drop={self.training.r_drop} compares two passes, which "
                f"attention.alignment.kind={alignment} trains on different positions; set it to 0, or use "
                "attention/alignment=straight_through"
            )
        if kind in {"minimum_risk", "distillation"} and alignment == "sampled":
            yield (
                f"objective.kind={kind} gives no reward to the positions that attention.alignment.kind=sampled "
                "samples; use objective=likelihood, or attention/alignment=straight_through"
            )
        if kind == "minimum_risk" and alignment in {"marginal", "variational", "posterior"}:
            yield (
                "objective.kind=minimum_risk does not sum over the positions of "
                f"attention.alignment.kind={alignment}; use objective=likelihood, or attention/alignment=expected"
            )
        unfit = {"minimum_risk": ("r_drop", "scheduled_sampling"), "likelihood": ()}
        for key in unfit.get(kind, ("r_drop",)):
            if value := getattr(self.training, key):
                yield f"training.{key}={value} is for objective=likelihood; with objective.kind={kind} set it to 0"
        if kind == "minimum_risk" and self.tokenizer.sampling_by_side[1]:
            yield (
                f"tokenizer.sampling={self.tokenizer.sampling} samples segmentations of references, but "
                "objective.kind=minimum_risk compares translations with a fixed one; use "
                "tokenizer.sampling_sides=source, or set it to 0"
            )


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
    def loading(self) -> dict[str, Any]:
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

    def conflicts(self) -> Iterator[str]:
        for key in ("nbest", "constraints", "glossary", "forbidden", "prefix"):
            if self.references is not None and (value := getattr(self, key)) not in {1, None}:
                yield f"references={self.references} are scored without search; leave out {key}={value}"


Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]


class ServeLimits(Section):
    """What clients may ask for."""

    body: Count
    body_seconds: Seconds
    seconds: Seconds
    texts: Count
    waiting: Count
    beam_size: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]


class ServeConfig(Loading):
    """nmt-serve."""

    run: Models
    host: Name
    port: Port
    token: Name | None
    hosts: Names
    workers: Threads | None
    wait: Annotated[float, Field(ge=0.0, le=10.0)]
    log_requests: bool
    limits: ServeLimits


class ExportConfig(Section):
    """nmt-export."""

    run: Paths
    output: PathName
    format: Literal["archive", "onnx"]
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
        unused = {"license": self.license, "sentence": self.sentence, "held_out": self.held_out}
        for key, value in unused.items() if self.format == "onnx" else ():
            if value:
                yield f"{key} is for format=archive, which has a model card and text; leave it out"


class CompareConfig(Section):
    """nmt-compare."""

    runs: Paths
    systems: Names
    split: Literal["validation", "test"]
    baseline: PathName | None
    separate_incomparable: bool
    finding: str | None
    examples: CountOrZero
    sentences: Annotated[list[Count], BeforeValidator(lambda value: [value] if isinstance(value, int) else value)]
    bootstrap_samples: Annotated[int, Field(ge=100, le=1_000_000)]
    randomisation_trials: Annotated[int, Field(ge=100, le=1_000_000)]
    output: PathName
    markdown: bool
