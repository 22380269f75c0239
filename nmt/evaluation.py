"""The one scoring path: training's validation, nmt-evaluate and nmt-compare all come through here."""

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.metrics.alignment import alignment_error_rate, attention_to_links, parse_pharaoh
from nmt.metrics.bleu import Scores, ScoreSettings, score, tokenizer_for
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


def alignment_scores(
    translator: Translator, sources: Sequence[str], references: Sequence[str], gold: Sequence[str]
) -> dict[str, float]:
    """AER, precision and recall (Och and Ney 2003) of the attention over the references, against gold alignments.

    {} for a model without attention.
    """
    aligned = translator.score(sources, references)
    links = [
        attention_to_links(each.alignment, each.tokens, each.source_tokens)
        for each in aligned
        if each.alignment is not None
    ]
    if not links:
        return {}
    scores = alignment_error_rate(links, [parse_pharaoh(line) for line in gold])
    return {"aer": scores.aer, "alignment_precision": scores.precision, "alignment_recall": scores.recall}


def evaluate_run(
    run: RunDirectory,
    translator: Translator,
    split: str,
    settings: ScoreSettings,
    checkpoint: str,
    progress: Progress | None = None,
    variant: str = "",
) -> tuple[dict[str, Any], Evaluation]:
    """Evaluate a split of a run's corpus; writes hypotheses/<split>.txt and the split's entry of results.json.

    `variant` tells settings that are not the run's own: it is added to both names, so that the run's own scores stay.
    """
    sources, references, gold = run.held_out(split)
    found = evaluate(translator, sources, references, settings, progress=progress)
    result: dict[str, Any] = {
        **found.scores.as_dict(),
        "sentences": len(sources),
        "sentences_per_second": round(found.sentences_per_second, 2),
        "checkpoint": checkpoint,
        "search": translator.search.model_dump(),
    }
    if gold is not None:
        aligned = alignment_scores(translator, sources, references, gold)
        result |= {name: round(value, 4) for name, value in aligned.items()}
    name = f"{split}.{variant}" if variant else split
    run.write_hypotheses(name, found.hypotheses)
    run.update_json(run.results, {name: result})
    return result, found
