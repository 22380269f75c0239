"""Scores of each target language, when sources start with tags such as "<2de>" (data=multilingual)."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nmt.evaluate.bleu import METRICS, Counted, ScoreSettings, count
from nmt.system.text_table import Column, decimals, markdown

TAG = re.compile(r"<2([a-z][\w.-]*)> ")
COLUMNS = [
    Column("language", "Language"),
    Column("sentences", "Sentences"),
    *(Column(metric, name, decimals(2)) for metric, name in zip(METRICS, ("BLEU", "chrF", "TER"), strict=True)),
]


def count_by_language(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    settings: ScoreSettings,
    metrics: Collection[str],
) -> dict[str, Counted]:
    """Return the statistics of each target language's sentences, such as "de"; {} unless all sources with text have a
    tag."""
    members: dict[str, list[int]] = {}
    for number, source in enumerate(sources):
        if tag := TAG.match(source):
            members.setdefault(tag[1], []).append(number)
        elif source.strip():
            return {}
    return {
        language: count(
            [hypotheses[i] for i in numbers], [references[i] for i in numbers], settings.of(language), metrics
        )
        for language, numbers in members.items()
    }


def language_rows(by_language: Mapping[str, Counted]) -> dict[str, dict[str, Any]]:
    """Return the entry "languages" of results.json: sentences and scores of each."""
    return {
        language: {"sentences": len(counted.counts["bleu"]), **counted.scores().as_dict()}
        for language, counted in by_language.items()
    }


def language_table(result: Mapping[str, Any]) -> str:
    """Render the languages' scores in an entry of results.json as a Markdown table, all sentences together last."""
    rows = [{"language": name, **scores} for name, scores in result["languages"].items()]
    return markdown([*rows, {"language": "all", **result}], COLUMNS)
