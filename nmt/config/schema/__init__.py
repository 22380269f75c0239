"""The configuration of nmt-train, and those of the other commands. The other modules here define their sections."""

import os
from collections.abc import Iterator
from typing import Any, Literal, Self

from nmt.config.keys import path_keys
from nmt.config.overrides import user_path
from nmt.config.schema.attention import NORMALIZERS_WITH_LOG_WEIGHTS
from nmt.config.schema.base import Device, Name, PathName, Processes, Section, Seed, Threads
from nmt.config.schema.commands import CompareConfig as CompareConfig
from nmt.config.schema.commands import EvaluateConfig as EvaluateConfig
from nmt.config.schema.commands import ExportConfig as ExportConfig
from nmt.config.schema.commands import Metric as Metric
from nmt.config.schema.commands import SavedRunCommand as SavedRunCommand
from nmt.config.schema.commands import ServeConfig as ServeConfig
from nmt.config.schema.commands import TranslateConfig as TranslateConfig
from nmt.config.schema.data import Data, MultilingualData, TokenizerConfig
from nmt.config.schema.model import Model, Size
from nmt.config.schema.search import Beam as Beam
from nmt.config.schema.search import Greedy as Greedy
from nmt.config.schema.search import MinimumBayesRisk as MinimumBayesRisk
from nmt.config.schema.search import Sampling as Sampling
from nmt.config.schema.search import Search as Search
from nmt.config.schema.search import SearchLimits as SearchLimits
from nmt.config.schema.training import Loggers, Objective, Optimizer, Schedule, Tracking, Training, Validation

Precision = Literal["auto", "fp32", "bf16", "fp16"]


class Machine(Section):
    device: Device
    precision: Precision
    threads: Threads | None


class Evaluation(Section):
    tokenize: Name
    lowercase: bool


DROPOUTS = ("dropout", "word_dropout", "recurrent_dropout", "zoneout", "weight_drop")  # keys of several sections
CHECKPOINT = ".ckpt"  # ends the path of a COMET model, unlike the name of one


def _absolute(path: Any) -> Any:  # noqa: ANN401
    """The absolute form of a path, or of each path of a list; None stays."""
    if isinstance(path, list):
        return [_absolute(part) for part in path]
    return path and os.path.abspath(user_path(path))


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
    logger: Loggers
    tracking: Tracking
    search: Search
    evaluation: Evaluation

    def with_absolute_paths(self) -> Self:
        """The same with absolute paths, so that a run can be resumed from any directory."""
        sections = {}
        for name in ("data", "tokenizer", "objective", "training", "embedding"):
            section = getattr(self, name)
            paths = {key: _absolute(value) for key, value in section if key in PATH_FIELDS and value is not None}
            sections[name] = section.model_copy(update=paths)
        if isinstance(self.data, MultilingualData):
            names = ("train", "validation", "test")
            corpora = [
                corpus.model_copy(update={name: _absolute(getattr(corpus, name)) for name in names})
                for corpus in self.data.corpora
            ]
            sections["data"] = sections["data"].model_copy(update={"corpora": corpora})
        if self.validation.comet_model.endswith(CHECKPOINT):
            path = _absolute(self.validation.comet_model)
            sections["validation"] = self.validation.model_copy(update={"comet_model": path})
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
        if self.embedding.pretrained is not None and self.training.start_from is not None:
            yield ("embedding.pretrained and training.start_from both give initial embeddings; leave one out")
        vectors = self.embedding.pretrained or [None, None]
        missing = vectors.count(None) == len(vectors) if self.embedding.tie_source_target else None in vectors
        if self.embedding.frozen and missing and self.training.start_from is None:
            yield (
                "embedding.frozen=true would keep random embeddings; give embedding.pretrained (for both languages, "
                "unless they share one table) or training.start_from, or set it to false"
            )
        if self.decoder.copy and not shared:
            yield (
                "decoder.copy=true needs one vocabulary for both languages, so that a source token is a target token; "
                "set tokenizer.joint=true (or one tokenizer model), or decoder.copy=false"
            )
        if self.training.guided_alignment:
            yield from self._conflicts_of_guided_alignment()
        if self.validation.monitor == "aer":
            yield from self._conflicts_of_aer()
        if self.attention.kind == "none" and (override := self.search.needing_attention()):
            yield f"{override} needs an attention, but attention.kind=none; set it to 0"
        yield from self._conflicts_of_objective()

    @property
    def passes_differ(self) -> bool:
        """Do two passes over the same sentences differ in training?"""
        parts = self.embedding, self.encoder, self.encoder.self_attention, self.decoder, self.attention
        dropped = any(getattr(part, name, 0) for part in parts for name in DROPOUTS)
        if dropped or self.attention.kind == "none":
            return dropped
        drawn = {"sampled", "straight_through", "variational"}
        return self.attention.normalizer.kind in {"monotonic", "mocha"} or self.attention.alignment.kind in drawn

    def _lacks_alignments(self) -> bool:
        return self.data.kind in {"hub", "multilingual"} or (self.data.kind == "files" and self.data.alignments is None)

    def _conflicts_of_guided_alignment(self) -> Iterator[str]:
        if self.attention.kind == "none":
            yield "training.guided_alignment guides an attention, but attention.kind=none; set it to 0"
        elif self.attention.normalizer.kind not in NORMALIZERS_WITH_LOG_WEIGHTS:
            yield (
                "training.guided_alignment needs the logarithms of the weights, which "
                f"attention.normalizer.kind={self.attention.normalizer.kind} does not give; set it to 0, or use "
                "attention/normalizer=softmax"
            )
        if self._lacks_alignments():
            yield (
                "training.guided_alignment needs the training corpus's word alignments: data=files with data.alignments"
            )

    def _conflicts_of_aer(self) -> Iterator[str]:
        if self.attention.kind == "none":
            yield "validation.monitor=aer scores an attention, but attention.kind=none; monitor bleu or loss"
        if self._lacks_alignments():
            yield (
                "validation.monitor=aer needs gold word alignments of the validation set: data=files with "
                "data.alignments, or monitor bleu or loss"
            )

    def _conflicts_of_objective(self) -> Iterator[str]:
        alignment = self.attention.alignment.kind if self.attention.kind == "attention" else "none"
        kind = self.objective.kind
        if self.training.r_drop and alignment in {"sampled", "variational"}:
            yield (
                f"training.r_drop={self.training.r_drop} compares two passes, which "
                f"attention.alignment.kind={alignment} trains on different positions; set it to 0, or use "
                "attention/alignment=expected"
            )
        if kind == "distillation" and alignment == "sampled":
            yield (
                f"objective.kind={kind} gives no reward to the positions that attention.alignment.kind=sampled "
                "samples; use objective=likelihood, or attention/alignment=straight_through"
            )
        if kind != "likelihood" and self.training.r_drop:
            yield (
                f"training.r_drop={self.training.r_drop} is for objective=likelihood; with objective.kind={kind} set "
                "it to 0"
            )


# The last parts of the keys whose values are paths, in any section.
PATH_FIELDS = {key.rpartition(".")[2] for key in path_keys(TrainConfig)} - {"run"}
