"""The models of the service: how they are loaded and named, and their description in /v1/models."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.exceptions import HTTPException

from nmt.attention.attention import MultiHeadAttention
from nmt.config.errors import UserError, user_path
from nmt.config.schema.model import ScoredAttention
from nmt.evaluate.metrics import METRICS
from nmt.serve.messages import ModelInfo
from nmt.system.run import RunDirectory, load_config, read_json, runs_below
from nmt.translate.guidance import prefix_tokens
from nmt.translate.search import Attend, merge_search
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
TIME = re.compile(r"[\d/-]*\d\d-\d\d-\d\d(-\d+)?")  # default name of a run's folder: the time at which the run began
EXAMPLES, MAX_EXAMPLE = 5, 120  # number of example sentences, and characters that each of them has at most

Runs = Sequence[str | Sequence[str]]


@dataclass(frozen=True)
class ServedModel:
    """A loaded model or ensemble, which requests choose by its name."""

    info: ModelInfo
    translator: Translator

    def with_search(self, changes: Mapping[str, Any], nbest: int = 1) -> Translator:
        """Return a translator with the search settings changed. Raises UserError for settings that the search method
        lacks, that are impossible, or that exceed the service's limit on the beam size."""
        trained, translator, limit = self.translator.settings, self.translator, self.info.max_beam_size
        if (settings := merge_search(trained, changes)) != trained:
            translator = translator.with_search(settings)
        size = max(nbest, translator.method.beam_size)
        if size > limit:
            key = "nbest" if nbest == size else "beam_size"
            raise UserError(f"{key}: {size} is above this service's limit of {limit}")
        translator.method.check_nbest(nbest)
        return translator

    def count_tokens(self, text: str, label: str, side: Literal["source", "target"] = "source") -> int:
        """Count the tokens of a text, including EOS. Raises HTTPException, which calls the text `label`, if there are
        more than the model reads."""
        tokenizers, limit = self.translator.tokenizers, self.info.max_tokens
        tokenizer = tokenizers.source if side == "source" else tokenizers.target
        tokens = len(tokenizer.encode([text])[0])
        if tokens > limit:
            raise HTTPException(413, f"{label}: has {tokens} tokens, but this service takes at most {limit}")
        return tokens

    def check_guidance(self, attend: Attend | None, prefix: str | Sequence[str] | None = None) -> None:
        """Check that the prefix and the steps of `attend` fit into the longest translation, which the search does not
        check. Raises UserError if they do not fit."""
        most = max(self.info.max_tokens, self.translator.settings.max_length)
        length = len(prefix_tokens(self.translator.tokenizers.target, prefix)) if prefix else 0
        if length >= most:
            raise UserError(f"prefix: has {length} tokens, but translations have at most {most}, with </s>")
        if attend and max(attend) >= most:
            raise UserError(f"attend: there is no step {max(attend)}; translations have at most {most} tokens")


def load_models(runs: Runs, loading: Mapping[str, Any], max_beam_size: int) -> dict[str, ServedModel]:
    """Load models by name: each item of `runs` is a run, an ensemble (a list of runs), or a folder, of which all runs
    are loaded. loading: the other arguments of Translator.load. Raises UserError if a model cannot be loaded."""
    members = [group for run in runs for group in _groups(run)]
    models: dict[str, ServedModel] = {}
    for name, group in zip(_names(members), members, strict=True):
        translator = Translator.load(group, **loading)
        limit = max(max_beam_size, translator.method.beam_size)  # the beam that the run configures is always allowed
        models[name] = ServedModel(_info(name, group, translator, limit), translator)
    return models


def _groups(run: str | Sequence[str]) -> list[list[str]]:
    """List the models that an item of `runs` names, each as the list of its members: a run, an ensemble, or all runs
    below a folder."""
    group = [run] if isinstance(run, str) else list(run)
    folder = user_path(group[0])
    if len(group) > 1 or not folder.is_dir() or (folder / "config.yaml").is_file():
        return [group]
    runs = runs_below(folder)
    trained = [path for path in runs if RunDirectory(path).checkpoints.is_dir()]
    for path in runs if trained else []:
        if path not in trained:
            log.warning("%s: not served: it has no checkpoint", path)
    return [[str(path)] for path in trained or runs] or [group]


def _names(members: Sequence[Sequence[str]]) -> list[str]:
    """Name each model after the folders of its members, with as many parent folders as the names need to differ. Raises
    UserError if a model is named twice."""
    paths = [[user_path(run).resolve().parts for run in group] for group in members]
    for depth in range(1, 1 + max(len(parts) for group in paths for parts in group)):
        names = ["+".join(_with_attention(parts, depth) for parts in group) for group in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"run=[{','.join(members[0])},...]: a run is named twice")


def _with_attention(parts: Sequence[str], depth: int) -> str:
    """Join the last `depth` parts of a run's path. If they are only a time, put the run's attention before them."""
    name = "/".join(parts[-depth:])
    if not TIME.fullmatch(name):
        return name
    attention = RunDirectory.existing(Path(*parts)).recorded_choices().get("attention")
    return name if attention is None else f"{attention} {name}"


def _info(name: str, runs: Sequence[str], translator: Translator, max_beam_size: int) -> ModelInfo:
    directory = RunDirectory.existing(runs[0])
    config, model, settings = load_config(directory.config), translator.model, translator.settings
    alone, first = len(runs) == 1, translator.model.models[0]
    scored = config.attention if isinstance(config.attention, ScoredAttention) else None
    attention, heads = "mean" if model.attends else None, 0
    if model.attends and alone:
        kind = scored.score.kind if scored else "mixed"
        attention = str(directory.recorded_choices().get("attention", kind))
    if alone and isinstance(first.decoder.attention, MultiHeadAttention):
        heads = first.decoder.attention.heads
    # /v1/explain has windows and stops only of an attention with a single head.
    single = scored if alone and not heads else None
    return ModelInfo(
        name=name,
        source=config.data.source_lang,
        target=config.data.target_lang,
        attention=attention,
        members=len(runs),
        latent=alone and first.decoder.sums_over_positions,
        heads=heads,
        window=single.window.kind if single is not None and single.window.kind != "global" else None,
        monotonic=single is not None and single.normalizer.kind in {"monotonic", "mocha"},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        score=_score(directory) if alone else None,
        beam_size=translator.method.beam_size,
        length_penalty=getattr(settings, "length_penalty", None),
        alpha=getattr(settings, "alpha", None),
        max_beam_size=max_beam_size,
        max_tokens=settings.max_source_length,
        examples=_examples(directory),
    )


def _score(directory: RunDirectory) -> str | None:
    """Read the recorded score on the test set or, without one, on the validation set, by the run's first metric."""
    results = read_json(directory.results)
    for split in ("test", "validation"):
        for name, metric in METRICS.items():
            score = results.get(split, {}).get(name)
            if isinstance(score, float | int) and math.isfinite(score):
                return f"{metric.heading} {score:.1f}"
    return None


def _examples(directory: RunDirectory) -> list[str]:
    """Choose short sources of the validation set, at equal distances among all short ones."""
    try:
        sources, _, _ = directory.held_out("validation")
    except UserError:  # an exported archive may lack the validation set
        return []
    short = list(dict.fromkeys(line for line in sources if 0 < len(line) <= MAX_EXAMPLE))
    return short[:: max(1, len(short) // EXAMPLES)][:EXAMPLES]
