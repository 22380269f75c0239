"""The one scoring path: training's validation, nmt-evaluate and nmt-compare all come through here."""

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.metrics.alignment import alignment_error_rate, parse_pharaoh
from nmt.metrics.bleu import Scores, ScoreSettings, score, score_by_length, tokenizer_for
from nmt.run import RunDirectory
from nmt.translator import Progress, Translation, Translator


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
    if translator.model.decoder.attention is None:
        return None
    pharaoh = [each.word_alignment() for each in translator.score(sources, references)]
    if gold is None:
        return Aligned(pharaoh, {})
    links = [parse_pharaoh(line)[0] for line in pharaoh]
    scores = alignment_error_rate(links, [parse_pharaoh(line) for line in gold])
    return Aligned(
        pharaoh, {"aer": scores.aer, "alignment_precision": scores.precision, "alignment_recall": scores.recall}
    )


def evaluate_run(
    run: RunDirectory,
    translator: Translator,
    split: str,
    settings: ScoreSettings,
    checkpoint: str,
    progress: Progress | None = None,
    variant: str = "",
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluate a split of a run's corpus; writes hypotheses/<split>.txt, word alignments of translations and
    references to alignments/, and the split's entry of results.json.

    `variant` tells settings that are not the run's own: it is added to both names, so that the run's own scores stay.
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
    name = f"{split}.{variant}" if variant else split
    aligned = align(translator, sources, references, gold)
    if aligned is not None:
        result |= {key: round(value, 4) for key, value in aligned.scores.items()}
        run.write_alignments(f"{name}.translations", [each.word_alignment() for each in found.translations])
        run.write_word_weights(name, [each.word_weights() for each in found.translations])
        run.write_alignments(f"{name}.references", aligned.pharaoh)
    run.write_hypotheses(name, found.hypotheses)
    run.update_json(run.results, {name: result})
    return result, found
