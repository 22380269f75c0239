"""The complete configuration of each command. Its sections are defined in the modules of this package."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from nmt.config.arguments import user_path
from nmt.config.schema.base import (
    Count,
    CountOrZero,
    Name,
    Names,
    PathText,
    PathTexts,
    Positive,
    Section,
    Seed,
    Threads,
    as_list,
)
from nmt.config.schema.data import Data, TokenizerConfig
from nmt.config.schema.model import Model, Size
from nmt.config.schema.training import Objective, Optimizer, Schedule, Training, Validation

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
MAX_HYPOTHESES = 10_000  # per sentence; each has its own decoder state
# Fields of data, tokenizer, objective and training that hold a path or a list of paths.
PATH_FIELDS = {"path", "train", "validation", "test", "extra", "cache_dir", "source_model", "target_model"}
PATH_FIELDS |= {"teachers", "start_from"}


class Machine(Section):
    device: Device
    precision: Precision
    threads: Threads | None


class SearchLimits(Section):
    """Limits of every kind of search; lengths are in tokens and include `</s>`."""

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


class TrainConfig(Model, Machine):
    """nmt-train."""

    run: PathText | None
    seed: Seed
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
        """A copy with absolute paths, so that a saved run finds its data from any working directory."""
        sections = {}
        for name in ("data", "tokenizer", "objective", "training"):
            section = getattr(self, name)
            paths = {key: _absolute(value) for key, value in section if key in PATH_FIELDS}
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
        elif self.attention.normalizer.kind not in {"softmax", "monotonic"}:
            yield (
                "training.guided_alignment has no gradient through the exact zeros of "
                f"attention.normalizer.kind={self.attention.normalizer.kind}; set it to 0, or use "
                "attention/normalizer=softmax"
            )
        if self.data.kind == "hub" or (self.data.kind == "files" and self.data.alignments is None):
            yield "training.guided_alignment needs word alignments for training: data=files with data.alignments"

    def _conflicts_of_objective(self) -> Iterator[str]:
        kind, training, tokenizer = self.objective.kind, self.training, self.tokenizer
        hard = self.attention.kind == "attention" and self.attention.normalizer.kind == "hard"
        if hard and training.r_drop:
            yield (
                f"training.r_drop={training.r_drop} does not train attention.normalizer.kind=hard, which is rewarded "
                "by the likelihood alone; set it to 0, or use attention/normalizer=gumbel"
            )
        if hard and kind != "likelihood":
            yield (
                f"objective.kind={kind} does not train attention.normalizer.kind=hard, which is rewarded by the "
                "likelihood alone; use objective=likelihood, or attention/normalizer=gumbel"
            )
        incompatible = {"minimum_risk": ("r_drop", "scheduled_sampling"), "distillation": ("r_drop",), "likelihood": ()}
        for key in incompatible[kind]:
            if value := getattr(training, key):
                yield f"training.{key}={value} is for objective=likelihood; with objective.kind={kind} set it to 0"
        if kind == "minimum_risk" and tokenizer.sampling_by_side[1]:
            yield (
                f"tokenizer.sampling={tokenizer.sampling} draws new segmentations of the references, but "
                "objective.kind=minimum_risk compares translations with fixed ones; use "
                "tokenizer.sampling_sides=source, or set it to 0"
            )


def _absolute(value: Any) -> Any:  # noqa: ANN401
    """The absolute form of a path or a list of paths; None stays None."""
    if isinstance(value, list):
        return [_absolute(path) for path in value]
    return None if value is None else os.path.abspath(user_path(value))


class SavedRunCommand(Section):
    """Keys of all commands that load a trained run, or several as an ensemble; null: as the (first) run was trained."""

    run: PathTexts
    checkpoint: Literal["best", "last"]
    device: Device | None
    precision: Precision | None
    threads: Threads | None
    seed: Seed | None
    search: dict[str, str | int | float | bool | None]

    @property
    def loading(self) -> dict[str, Any]:
        """Keyword arguments of Translator.load."""
        return {name: getattr(self, name) for name in SavedRunCommand.model_fields if name != "run"}


class EvaluateConfig(SavedRunCommand):
    """nmt-evaluate."""

    split: Literal["validation", "test"]
    tokenize: Name | None
    lowercase: bool | None
    output: PathText | None

    def conflicts(self) -> Iterator[str]:
        if self.output is None and len(self.run) > 1:
            yield (
                "output=null writes into the run, but an ensemble's results belong to none of its runs; give "
                "output=FOLDER"
            )


class TranslateConfig(SavedRunCommand):
    """nmt-translate."""

    alignments: PathText | None
    references: PathText | None
    nbest: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
    interactive: bool
    buffer_lines: Count

    def conflicts(self) -> Iterator[str]:
        if self.references is not None and self.nbest > 1:
            yield f"references={self.references} are scored, not searched for; leave out nbest={self.nbest}"


class CompareConfig(Section):
    """nmt-compare."""

    runs: PathTexts
    systems: Names
    split: Literal["validation", "test"]
    baseline: PathText | None
    separate_incomparable: bool
    examples: CountOrZero
    sentences: Annotated[list[Count], BeforeValidator(as_list)]
    bootstrap_samples: Annotated[int, Field(ge=100, le=1_000_000)]
    randomisation_trials: Annotated[int, Field(ge=100, le=1_000_000)]
    output: PathText
    markdown: bool
