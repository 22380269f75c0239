"""Evaluation of a model of several directions: which sentence has which, the scores of each and their mean."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from nmt.config.errors import UserError
from nmt.config.schema.record import Report
from nmt.data.prepared import Direction, directions_of_pairs
from nmt.data.reading.language_tags import Tags
from nmt.evaluate.bleu import METRICS, Scores, ScoreSettings, score
from nmt.system.run import RunDirectory
from nmt.system.text_table import Column, decimals, markdown

COLUMNS = [
    Column("direction", "Direction"),
    Column("sentences", "Sentences"),
    *(Column(metric, name, decimals(2)) for metric, name in zip(METRICS, ("BLEU", "chrF", "TER"), strict=True)),
]


def directions_of(run: RunDirectory, split: str, sentences: int) -> list[Direction]:
    """The direction of each of a held-out split's sentences; none for a run of one direction. Raises UserError."""
    data = run.read_manifest().get("data", {})
    if not data.get("directions"):
        return []
    try:
        report = Report.model_validate(data)
        corpora = {name: counts.corpora for name, counts in report.splits.items()}[split]  # type: ignore[index]
        found = directions_of_pairs([(source, target) for source, target in report.directions], corpora)
        if len(found) != sentences:
            raise ValueError
        return found
    except (ValueError, KeyError):
        raise UserError(f"{run.path}: a file of this run is damaged (manifest.json)") from None


def tagged(sources: Sequence[str], directions: Sequence[Direction], tags: Tags) -> Sequence[str]:
    """Sources with the tags of their directions, if the model knows any."""
    if not tags or not directions:
        return sources
    return [tags.add(mark_of(each, tags), source) for source, each in zip(sources, directions, strict=True)]


def mark_of(direction: Direction, tags: Tags) -> str:
    """What stands in front of sentences of a direction, see nmt.data.reading.language_tags. Raises UserError."""
    return tags.mark(direction[0] if tags.sources else None, direction[1])


def score_directions(
    hypotheses: Sequence[str],
    references: Sequence[str],
    directions: Sequence[Direction],
    settings: ScoreSettings,
    metrics: Collection[str],
) -> dict[str, Scores]:
    """The scores of each direction, such as "en-de"."""
    members: dict[Direction, list[int]] = {}
    for number, direction in enumerate(directions):
        members.setdefault(direction, []).append(number)
    return {
        "-".join(direction): score(
            [hypotheses[i] for i in numbers], [references[i] for i in numbers], settings.of(direction[1]), metrics
        )
        for direction, numbers in members.items()
    }


def mean_scores(scores: Collection[Scores]) -> Scores:
    """The unweighted mean of the directions' scores."""

    def of(metric: str) -> float | None:
        values = [getattr(each, metric) for each in scores]
        return None if None in values else fmean(values)

    def signature(key: str) -> str | None:
        found = dict.fromkeys(getattr(each, key) for each in scores)
        return None if None in found else "; ".join(found)

    return Scores(
        bleu=fmean(each.bleu for each in scores),
        chrf=of("chrf"),
        ter=of("ter"),
        signature=signature("signature") or "",
        chrf_signature=signature("chrf_signature"),
        ter_signature=signature("ter_signature"),
    )


def direction_rows(directions: Sequence[Direction], scores: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """The entry "directions" of results.json: sentences and scores of each."""
    names = ["-".join(direction) for direction in directions]
    return {name: {"sentences": names.count(name), **each.as_dict()} for name, each in scores.items()}


def direction_table(result: Mapping[str, Any]) -> str:
    """A Markdown table of the directions' scores in an entry of results.json, their mean last."""
    found = [{"direction": name, **scores} for name, scores in result["directions"].items()]
    return markdown([*found, {"direction": "mean", **result}], COLUMNS)
