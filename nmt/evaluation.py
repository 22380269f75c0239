"""The one scoring path, of training's validation and nmt-evaluate; nmt-compare reads from runs how they were scored."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from nmt.config import schema
from nmt.config.compose import flatten, load_values
from nmt.config.errors import UserError
from nmt.files import locked
from nmt.metrics.alignment import alignment_error_rate, parse_pharaoh
from nmt.metrics.bleu import Scores, ScoreSettings, score, score_by_length, tokenizer_for
from nmt.run import EVALUATION, RunDirectory, read_json
from nmt.translator import Progress, Translation, Translator

log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """A split, translated and scored."""

    translations: list[Translation]
    scores: Scores
    sentences_per_second: float  # of translating, without scoring

    @property
    def hypotheses(self) -> list[str]:
        """The translations' text."""
        return [translation.text for translation in self.translations]


def score_settings(config: schema.Evaluation, target_lang: str) -> ScoreSettings:
    """Resolve tokenize=auto, and try it, so that a missing tokenizer is told now. Raises UserError."""
    tokenize = tokenizer_for(target_lang) if config.tokenize == "auto" else config.tokenize
    settings = ScoreSettings(tokenize, config.lowercase)
    try:
        score(["a"], ["a"], settings, ("bleu",))
    except ValueError as error:
        raise UserError(str(error)) from None
    return settings


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    settings: ScoreSettings,
    metrics: Collection[str] = ("bleu", "chrf", "ter"),
    progress: Progress | None = None,
) -> Evaluation:
    """Translate and score."""
    translator.reseed()
    began = time.perf_counter()
    translations = [nbest[0] for nbest in translator.translate_nbest(sources, 1, progress)]
    seconds = time.perf_counter() - began
    scores = score([translation.text for translation in translations], references, settings, metrics)
    return Evaluation(translations, scores, len(sources) / seconds)


class Aligned(NamedTuple):
    """References, aligned by forced decoding with a model that has attention."""

    pharaoh: list[str]  # word links of each pair
    scores: dict[str, float]  # aer, alignment_precision, alignment_recall against gold alignments; {} without any


def align(
    translator: Translator, sources: Sequence[str], references: Sequence[str], gold: Sequence[str] | None
) -> Aligned | None:
    """What the attention aligns in given translations, and AER, precision and recall (Och and Ney 2003).

    None for a model without attention.
    """
    if not translator.model.attends:
        return None
    pharaoh = [each.word_alignment() for each in translator.score(sources, references)]
    if gold is None:
        return Aligned(pharaoh, {})
    links = [parse_pharaoh(line)[0] for line in pharaoh]
    scores = alignment_error_rate(links, [parse_pharaoh(line) for line in gold])
    return Aligned(
        pharaoh, {"aer": scores.aer, "alignment_precision": scores.precision, "alignment_recall": scores.recall}
    )


@dataclass(frozen=True)
class EnsembleEvaluation:
    """A folder for an evaluation that does not go into a run: of an ensemble, which is none of its runs."""

    folder: RunDirectory
    about: Mapping[str, Any]  # what was evaluated, and how; the same for all splits in the folder

    @classmethod
    def at(
        cls,
        folder: Path,
        runs: Sequence[RunDirectory],
        translator: Translator,
        settings: ScoreSettings,
        checkpoint: str,
    ) -> Self:
        """Changes nothing yet. Raises UserError if the folder holds an evaluation of something else."""
        about = {
            "members": [str(run.path.resolve()) for run in runs],
            "checkpoint": checkpoint,
            "search": translator.search.model_dump(),
            "seed": translator.seed,
            "evaluation": asdict(settings),
            "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
            "asked": _asked(runs, translator.search),
        }
        there, here = dict(flatten(read_json(folder / EVALUATION))), dict(flatten(about))
        if there and (other := next((key for key in here if there.get(key) != here[key]), None)):
            raise UserError(
                f"output={folder}: holds another evaluation ({other} is {there.get(other)} there, {here[other]} here); "
                "name another folder"
            )
        return cls(RunDirectory(folder), about)

    def write_about(self) -> None:
        """What makes the folder one that nmt-compare reads."""
        self.folder.update_json(self.folder.path / EVALUATION, self.about)


def _asked(runs: Sequence[RunDirectory], search: schema.Search) -> dict[str, Any]:
    """What the runs were started with, by key, joined by "+" where they differ; of the search what is searched with."""
    first, *others = [run.recorded_choices() for run in runs]
    joined: dict[str, Any] = {"ensemble": len(runs)} if others else {}
    for key in dict.fromkeys(key for each in (first, *others) for key in each):
        values = list(dict.fromkeys(each.get(key, "default") for each in (first, *others)))
        if not key.startswith("search"):
            joined[key] = values[0] if len(values) == 1 else "+".join(map(str, values))
        elif key in first:
            joined[key] = first[key]
    trained = load_values(runs[0].config)["search"]
    given = {key: value for key, value in search.model_dump().items() if trained.get(key) != value}
    return joined | {f"search.{key}": value for key, value in given.items()}


def warn_of_other_texts(runs: Sequence[RunDirectory], split: str) -> None:
    """Tell of runs whose split is not the first's: they may have been trained on what is scored."""

    def text(run: RunDirectory) -> list[bytes | None]:
        files = [run.data / f"{split}.{side}" for side in ("source", "target")]
        return [file.read_bytes() if file.is_file() else None for file in files]

    for run in runs[1:]:
        if text(run) != text(runs[0]):
            log.warning("%s: has another %s set than %s, whose set is scored", run.path, split, runs[0].path)


def evaluate_run(
    run: RunDirectory,
    translator: Translator,
    split: str,
    settings: ScoreSettings,
    checkpoint: str,
    progress: Progress | None = None,
    variant: str = "",
    apart: EnsembleEvaluation | None = None,
    scored: Callable[[dict[str, Any]], object] | None = None,
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluate a split of a run's corpus; writes hypotheses/<split>.txt, word alignments of translations and
    references to alignments/, and the split's entry of results.json.

    `variant` tells settings that are not the run's own: it is added to both names, so that the run's own scores stay.
    All goes into the folder `apart`, if there is one, together with the text. `scored` gets the split's entry before
    anything is written, which may fail.
    """
    sources, references, gold = run.held_out(split)
    found = evaluate(translator, sources, references, settings, progress=progress)
    result: dict[str, Any] = {
        **found.scores.as_dict(),
        "bleu_by_length": score_by_length(found.hypotheses, references, sources, settings),
        "sentences": len(sources),
        "sentences_per_second": round(found.sentences_per_second, 2),
        "checkpoint": checkpoint,
        "search": translator.search.model_dump(),
    }
    aligned = align(translator, sources, references, gold)
    if aligned is not None:
        result |= {key: round(value, 4) for key, value in aligned.scores.items()}
    if apart is not None:
        result["members"] = apart.about["members"]
    if scored is not None:
        scored(result)
    if apart is not None:
        run = apart.folder
        apart.write_about()
        run.write_held_out(split, sources, references, gold)
    name = f"{split}.{variant}" if variant else split
    if aligned is not None:
        run.write_alignments(f"{name}.translations", [each.word_alignment() for each in found.translations])
        run.write_word_weights(name, [each.word_weights() for each in found.translations])
        run.write_alignments(f"{name}.references", aligned.pharaoh)
    run.write_hypotheses(name, found.hypotheses)
    with locked(run.path):
        run.update_json(run.results, {name: result})
    return result, found
