"""The models of the service: how they are loaded and named, and what /v1/models says about them."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.exceptions import HTTPException

from nmt.attention.attention import MultiHeadAttention
from nmt.config.compose import merge_search
from nmt.config.errors import UserError, user_path
from nmt.config.schema.model import ScoredAttention
from nmt.serve.messages import ModelInfo
from nmt.system.run import RunDirectory, load_config, read_json, runs_below
from nmt.translate.guidance import prefix_tokens
from nmt.translate.search import Attend
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
TIME = re.compile(r"[\d/-]*\d\d-\d\d-\d\d(-\d+)?")  # the name of a run that the user has not named
EXAMPLES, MAX_EXAMPLE = 5, 120  # sentences, characters of one

Runs = Sequence[str | Sequence[str]]


@dataclass(frozen=True)
class ServedModel:
    """A loaded model or ensemble."""

    info: ModelInfo
    translator: Translator

    @property
    def name(self) -> str:
        """The name by which requests choose the model."""
        return self.info.name

    def with_search(self, changes: Mapping[str, Any], nbest: int = 1) -> Translator:
        """Return the translator with these values of the section `search` changed.

        Raises UserError for values that are impossible or too expensive.
        """
        trained, translator, limit = self.translator.settings, self.translator, self.info.max_beam_size
        for key in changes:
            if not hasattr(trained, key):
                raise UserError(
                    f"{key}: {self.name} searches by search={trained.kind}; start the service with search=beam"
                )
        if (settings := merge_search(trained, changes)) != trained:
            translator = translator.with_search(settings)
        size = max(nbest, translator.method.beam_size)
        if size > limit:
            key = "nbest" if nbest == size else "beam_size"
            raise UserError(f"{key}: {size} is above this service's limit of {limit}")
        if nbest > (beam := getattr(settings, "beam_size", nbest)):
            raise UserError(f"nbest: {nbest} translations need a beam_size of {nbest} at least, not {beam}")
        translator.method.check_nbest(nbest)
        return translator

    def count_tokens(self, text: str, name: str, side: Literal["source", "target"] = "source") -> int:
        """Count the tokens of a text, EOS included. Raises HTTPException if the model would cut it."""
        tokenizers, limit = self.translator.tokenizers, self.info.max_tokens
        tokenizer = tokenizers.source if side == "source" else tokenizers.target
        tokens = len(tokenizer.encode([text])[0])
        if tokens > limit:
            raise HTTPException(413, f"{name}: has {tokens} tokens, but this service takes at most {limit}")
        return tokens

    def check_guidance(self, attend: Attend | None, prefix: str | Sequence[str] | None = None) -> None:
        """Raises UserError for more prefix tokens or steps than a translation may have, for which the search has no
        limit."""
        most = max(self.info.max_tokens, self.translator.settings.max_length)
        length = len(prefix_tokens(self.translator.tokenizers.target, prefix)) if prefix else 0
        if length >= most:
            raise UserError(f"prefix: has {length} tokens, but translations have at most {most}, with </s>")
        if attend and max(attend) >= most:
            raise UserError(f"attend: there is no step {max(attend)}; translations have at most {most} tokens")


def load_models(runs: Runs, loading: Mapping[str, Any], max_beam_size: int) -> dict[str, ServedModel]:
    """Load models by name, in order: of a run, of an ensemble (a list of runs), of all runs below a folder.

    loading: arguments of Translator.load. Raises UserError if one cannot be loaded.
    """
    members = [group for run in runs for group in _groups(run)]
    models: dict[str, ServedModel] = {}
    for name, group in zip(_names(members), members, strict=True):
        translator = Translator.load(group, **loading)
        limit = max(max_beam_size, translator.method.beam_size)  # never below the model's configured beam
        models[name] = ServedModel(_info(name, group, translator, limit), translator)
    return models


def _groups(run: str | Sequence[str]) -> list[list[str]]:
    """List the members of each model that a value of `run` names: a run, an ensemble, or all runs below a folder."""
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
    """Name each model after its folders, with as many parents as make the names differ. A folder that is named by the
    time at which its run began stands after the run's attention."""
    paths = [[user_path(run).resolve().parts for run in group] for group in members]
    for depth in range(1, 1 + max(len(parts) for group in paths for parts in group)):
        names = ["+".join(_with_attention(parts, depth) for parts in group) for group in paths]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"run=[{','.join(members[0])},...]: a run is named twice")


def _with_attention(parts: Sequence[str], depth: int) -> str:
    """Join the last `depth` parts of a run's path, after its attention if they say nothing but a time."""
    name = "/".join(parts[-depth:])
    if not TIME.fullmatch(name):
        return name
    attention = RunDirectory.existing(Path(*parts)).recorded_choices().get("attention")
    return name if attention is None else f"{attention} {name}"


def _info(name: str, runs: Sequence[str], translator: Translator, max_beam_size: int) -> ModelInfo:
    directory = RunDirectory.existing(runs[0])
    config, model, settings = load_config(directory.config), translator.model, translator.settings
    alone = len(runs) == 1
    scored = config.attention if isinstance(config.attention, ScoredAttention) else None
    choices = directory.recorded_choices()
    attention = None
    if model.attends:
        attention = str(choices.get("attention", scored.score.kind if scored else "mixed")) if alone else "mean"
    heads = 0
    first = model.models[0]
    if alone and isinstance(first.decoder.attention, MultiHeadAttention):
        heads = first.decoder.attention.heads
    # The windows and stops of several heads are not explained.
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
        bleu=_bleu(directory) if alone else None,
        beam_size=translator.method.beam_size,
        length_penalty=getattr(settings, "length_penalty", None),
        alpha=getattr(settings, "alpha", None),
        max_beam_size=max_beam_size,
        max_tokens=settings.max_source_length,
        examples=_examples(directory),
    )


def _bleu(directory: RunDirectory) -> float | None:
    """Read the recorded BLEU of the test set, or if there is none of the validation set."""
    results = read_json(directory.results)
    scores = [results[split]["bleu"] for split in ("test", "validation") if split in results]
    return scores[0] if scores else None


def _examples(directory: RunDirectory) -> list[str]:
    """Choose short sentences of the validation set, spread over it."""
    try:
        sources, _, _ = directory.held_out("validation")
    except UserError:  # an archive need not hold its corpus
        return []
    short = list(dict.fromkeys(line for line in sources if 0 < len(line) <= MAX_EXAMPLE))
    return short[:: max(1, len(short) // EXAMPLES)][:EXAMPLES]
