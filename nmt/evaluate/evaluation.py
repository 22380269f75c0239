"""Translates and scores a test set, for validation during training and for nmt-evaluate alike."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from nmt.config.checks import flatten
from nmt.config.errors import UserError
from nmt.config.schema import commands as schema
from nmt.data.word_alignment import alignment_error_rate, parse_pharaoh
from nmt.evaluate.metrics import (
    WITHOUT_TEXT,
    Counted,
    ScoreSettings,
    check_known,
    count,
    score_by_length,
    signatures,
    tokenizer_for,
)
from nmt.system.files import locked, to_json, write_lines
from nmt.system.run import EVALUATION, RunDirectory, digest, load_values, read_json
from nmt.translate.translation import Translation
from nmt.translate.translator import Progress, Translator

log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """Translations of a test set and their scores."""

    translations: list[Translation]
    scores: dict[str, float]  # by metric
    sentences_per_second: float  # speed of translation, without scoring
    counted: Counted  # statistics of each sentence

    @property
    def hypotheses(self) -> list[str]:
        """Return the text of the translations."""
        return [translation.text for translation in self.translations]


def score_settings(config: schema.Evaluation, target_lang: str, monitor: str | None = None) -> ScoreSettings:
    """Make the settings of scores. With tokenize=auto, `tokenizer_for` chooses the tokenizer by `target_lang`. Raises
    UserError for an unknown metric, also as `monitor` (validation.monitor), and for an unavailable tokenizer."""
    tokenize = tokenizer_for(target_lang) if config.tokenize == "auto" else config.tokenize
    settings = ScoreSettings(tokenize, config.lowercase, tuple(config.metrics))
    for name in config.metrics:
        check_known("evaluation.metrics", name)
    if monitor is not None:
        check_known("validation.monitor", monitor, WITHOUT_TEXT)
    signatures(settings)  # raises UserError now, before a training
    return settings


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    settings: ScoreSettings,
    metrics: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Translate the sources, score the best translations by `metrics`, or else by all metrics of the settings, and
    measure the speed of translation."""
    translator.reseed()
    began = time.perf_counter()
    translations = [nbest[0] for nbest in translator.translate_nbest(sources, 1, progress)]
    seconds = time.perf_counter() - began
    hypotheses, speed = [translation.text for translation in translations], len(sources) / seconds
    counted = count(hypotheses, references, settings, metrics, sources)
    return Evaluation(translations, counted.scores(), speed, counted)


class ReferenceAlignment(NamedTuple):
    """Word alignments between sources and references, from the attention weights of forced decoding."""

    pharaoh: list[str]  # word links of each sentence pair, in Pharaoh format
    scores: dict[str, float]  # aer, alignment_precision, alignment_recall; empty without gold alignments


def align(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    gold: Sequence[str] | None,
    progress: Progress | None = None,
) -> ReferenceAlignment | None:
    """Align references to sources by the attention weights of forced decoding; return None without attention. With
    `gold` alignments, compute AER, precision and recall too (Och and Ney 2003)."""
    if not translator.model.attends:
        return None
    pharaoh = [translation.word_alignment() for translation in translator.score(sources, references, progress=progress)]
    if gold is None:
        return ReferenceAlignment(pharaoh, {})
    links = [parse_pharaoh(line)[0] for line in pharaoh]
    aer, precision, recall = alignment_error_rate(links, [parse_pharaoh(line) for line in gold])
    return ReferenceAlignment(pharaoh, {"aer": aer, "alignment_precision": precision, "alignment_recall": recall})


@dataclass(frozen=True)
class EvaluationFolder:
    """A folder for an evaluation that is not written to a run's directory, such as the evaluation of an ensemble."""

    folder: RunDirectory
    description: Mapping[str, Any]  # runs and settings, shared by all splits in the folder

    @classmethod
    def at(
        cls,
        folder: Path,
        runs: Sequence[RunDirectory],
        translator: Translator,
        settings: ScoreSettings,
        checkpoint: str,
    ) -> Self:
        """Describe an evaluation of these runs by this translator in this folder, without writing anything yet. Raises
        UserError if the folder already holds an evaluation of other runs or settings."""
        shortlist = translator.shortlist
        description = {
            "members": [str(run.source.resolve()) for run in runs],
            "checkpoint": checkpoint,
            "search": translator.settings.model_dump(),
            "seed": translator.seed,
            "evaluation": {**asdict(settings), "metrics": [*settings.metrics]},
            "parameters": sum(parameter.numel() for parameter in translator.model.parameters()),
            "precision": translator.machine.precision_of_search,
            "shortlist": None if shortlist is None else digest({k: v.tolist() for k, v in shortlist.arrays().items()}),
            "choices": _merged_choices(runs, translator),  # what tells this evaluation apart in a comparison
        }
        saved, new = dict(flatten(read_json(folder / EVALUATION))), dict(flatten(description))
        if saved and (key := next((key for key in new if saved.get(key) != new[key]), None)):
            raise UserError(
                f"output={folder}: holds another evaluation ({key} is {saved.get(key)} there, {new[key]} here); name "
                "another folder"
            )
        return cls(RunDirectory(folder), description)


def _merged_choices(runs: Sequence[RunDirectory], translator: Translator) -> dict[str, Any]:
    """Merge the runs' recorded choices, and add the settings that this evaluation changes. Values in which the runs
    differ are joined by "+"; choices of the search are those of the first run."""
    recorded = [run.recorded_choices() for run in runs]
    joined: dict[str, Any] = {"ensemble": len(runs)} if len(runs) > 1 else {}
    for key in dict.fromkeys(key for choices in recorded for key in choices):
        values = list(dict.fromkeys(choices.get(key, "default") for choices in recorded))
        if not key.startswith("search"):
            joined[key] = values[0] if len(values) == 1 else "+".join(map(str, values))
        elif key in recorded[0]:
            joined[key] = recorded[0][key]
    trained = load_values(runs[0].config)["search"]
    search = translator.settings.model_dump()
    changed = {f"search.{key}": value for key, value in search.items() if trained.get(key) != value}
    machine, precision = runs[0].last_machine(), translator.machine.precision_of_search
    if precision != machine.get("precision", precision):
        changed["precision"] = precision
    if translator.shortlist is not None:
        changed["shortlist"] = True
    return joined | changed


def warn_if_texts_differ(runs: Sequence[RunDirectory], split: str) -> None:
    """Warn of runs whose held-out texts differ from those of the first run, which are scored: these runs may have been
    trained on the scored texts."""
    texts = []
    for run in runs:
        files = (run.data / f"{split}.{side}" for side in ("source", "target"))
        texts.append([file.read_bytes() if file.is_file() else None for file in files])
        if texts[-1] != texts[0]:
            log.warning("%s: its %s set differs from that of %s, which is scored", run.source, split, runs[0].source)


def evaluate_run(
    run: RunDirectory,
    translator: Translator,
    split: str,
    settings: ScoreSettings,
    checkpoint: str,
    progress: Progress | None = None,
    output: EvaluationFolder | None = None,
    suffix: str = "",
    on_result: Callable[[dict[str, Any]], object] | None = None,
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluate a split of a run's corpus. Returns the entry of results.json and the evaluation.

    Writes hypotheses/<split>.txt, word alignments of translations and references to alignments/, and the entry of
    results.json: to the folder `output`, by default to the run's directory. With a `suffix`, which names settings that
    differ from the run's, <split>.<suffix> replaces <split> in all names, so that earlier results stay. on_result:
    receives the entry before the files are written.
    """
    sources, references, gold = run.held_out(split)
    written = run if output is None else output.folder
    read_json(written.results)  # if this file is damaged, raise before the long work
    evaluation = evaluate(translator, sources, references, settings, progress=progress)
    main = settings.metrics[0]
    result: dict[str, Any] = {
        **{name: round(value, 4) for name, value in evaluation.scores.items()},
        "signatures": dict(evaluation.counted.signatures),
        "by_length": score_by_length(evaluation.counted.counts[main], main, sources),
        "sentences": len(sources),
        "sentences_per_second": round(evaluation.sentences_per_second, 2),
        "checkpoint": checkpoint,
        "search": translator.settings.model_dump(),
    }
    aligned = align(translator, sources, references, gold)
    if aligned is not None:
        result |= {key: round(value, 4) for key, value in aligned.scores.items()}
    if output is not None:
        result["members"] = output.description["members"]
    if on_result is not None:
        on_result(result)
    translator.group.on_main(lambda: _write(run, split, output, suffix, result, evaluation, aligned))
    return result, evaluation


def _write(
    run: RunDirectory,
    split: str,
    output: EvaluationFolder | None,
    suffix: str,
    result: dict[str, Any],
    evaluation: Evaluation,
    aligned: ReferenceAlignment | None,
) -> None:
    name = f"{split}.{suffix}" if suffix else split
    if output is not None:
        sources, references, gold = run.held_out(split)
        run = output.folder
        run.update_json(run.path / EVALUATION, output.description)  # nmt-compare recognises the folder by this file
        run.write_held_out(split, sources, references, gold)
    if aligned is not None:
        links = [translation.word_alignment() for translation in evaluation.translations]
        weights = [to_json(translation.word_weights() or {}) for translation in evaluation.translations]
        write_lines(run.alignments / f"{name}.translations.pharaoh", links)
        write_lines(run.alignments / f"{name}.words.jsonl", weights)
        write_lines(run.alignments / f"{name}.references.pharaoh", aligned.pharaoh)
    write_lines(run.hypotheses / f"{name}.txt", evaluation.hypotheses)
    with locked(run.path):
        run.update_json(run.results, {name: result})
