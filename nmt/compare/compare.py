"""Group runs into systems, score and test them on one test set. Results are plain values, for tables and the page."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from nmt.compare.entry import Entry, HeldOut, System
from nmt.compare.examples import example_sentences
from nmt.compare.field import Field, RunScores
from nmt.compare.ranking import Ranking
from nmt.config.compose import PATH_KEYS
from nmt.config.errors import printable
from nmt.config.overrides import user_path
from nmt.config.schema import Metric
from nmt.evaluate.bleu import Counts, score_by_length, signatures
from nmt.evaluate.significance import Resampling
from nmt.explain.faithfulness import run_figures, system_figures
from nmt.system.text_table import short

MIN_BUCKET, MAX_BUCKETS = 50, 8  # BLEU by length: at least 50 sentences per bucket, at most 8 buckets
DEFAULT = Ranking()
ALL = "all"  # baseline=all: every pair of systems
TESTS = ("difference", "difference_ci", "p", "p_raw", "p_stratified", "freedom", "detectable", "seeds_needed")
log = logging.getLogger(__name__)

Comparison = dict[str, Any]


def group(entries: Sequence[Entry]) -> list[System]:
    """Systems in the order of their first entries, named by the choices in which they differ."""
    groups: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        members = groups.setdefault(entry.config or (entry.name,), [])
        if twin := next((e for e in members if (e.seed, e.hypotheses) == (entry.seed, entry.hypotheses)), None):
            log.warning("%s repeats %s: left out", entry.name, twin.name)
        else:
            members.append(entry)
    systems = [sorted(members, key=lambda entry: (entry.seed or 0, entry.name)) for members in groups.values()]
    choices = [members[0].choices for members in systems if members[0].choices]
    # Keys that differ between systems, but not paths that differ between the runs of one.
    within = {key for members in systems for key in PATH_KEYS if _differ(key, [entry.choices for entry in members])}
    varied = sorted({key for values in choices for key in values if _differ(key, choices)} - within)
    names = [_name(members[0], [key for key in varied if key != "experiment"]) for members in systems]
    names = [
        name if names.count(name) == 1 else _name(members[0], varied)
        for name, members in zip(names, systems, strict=True)
    ]
    return [
        System(name if names.count(name) == 1 else f"{name} ({members[0].name})", members)
        for name, members in zip(names, systems, strict=True)
    ]


def _differ(key: str, choices: Iterable[Mapping[str, Any]]) -> bool:
    return len({str(values.get(key)) for values in choices}) > 1


def _name(entry: Entry, varied: Sequence[str]) -> str:
    """The name of a system, such as "bahdanau", "bahdanau encoder=lstm" or "lr=0.003"."""
    choices = entry.choices
    if not entry.config:
        return entry.name
    parts = [str(choices["attention"])] if "attention" in choices and "attention" in varied else []
    ends = [key if "/" in key else key.rpartition(".")[2] for key in varied]
    parts += [
        f"{end if ends.count(end) == 1 else key}={short(choices[key])}"
        for key, end in zip(varied, ends, strict=True)
        if key != "attention" and choices.get(key) is not None
    ]
    return printable(" ".join(parts) or str(choices.get("attention", entry.name)))


def find(name: str, systems: Sequence[System]) -> str | None:
    """The name of the system with this name or run; None if there is none."""
    path = user_path(name).resolve()
    for system in systems:
        if name == system.name or any(entry.config and Path(entry.name).resolve() == path for entry in system.entries):
            return system.name
    return None


def compare(
    systems: Sequence[System],
    held_out: HeldOut,
    split: str,
    *,
    baseline: str | None = None,
    ranking: Ranking = DEFAULT,
    examples: int,
    sentences: Sequence[int],
    bootstrap_samples: int,
    randomisation_trials: int,
) -> Comparison:
    """Score and rank systems, and test their differences to the baseline, or with baseline=all those of all pairs.

    `baseline` is the name of a system; by default it is the best one, with p corrected for all pairs, because the
    scores have chosen it. `sentences` are the numbers of example sentences, from 1; if empty, `examples` sentences are
    chosen. docs/run.md describes the result. Raises UserError if one is out of range.
    """
    resampling = Resampling(len(held_out.references), bootstrap_samples, randomisation_trials)
    field = Field(systems, held_out, ranking, resampling)
    systems = field.ranked()
    named = next((system for system in systems if system.name == baseline), None)
    names = signatures(held_out.settings)
    base = None if baseline == ALL else named or systems[0]
    runs = field.run_scores(base)
    tested = [_all_rounded(row) for row in field.differences(named)]
    differences = [row for row in tested if base is None or row["baseline"] == base.name]
    rows = [_system_row(system, runs, field, held_out) for system in systems]
    if base is None:
        letters = field.letters(differences)
        rows = [{**row, "letters": letters[row["name"]]} for row in rows]
    else:
        tests = {row["system"]: {key: row[key] for key in TESTS} for row in differences}
        rows = [{**row, **tests.get(row["name"], dict.fromkeys(TESTS))} for row in rows]
    return {
        "split": split,
        "sentences": len(held_out.references),
        "signature": names["bleu"],
        "chrf_signature": names["chrf"],
        "ter_signature": names["ter"],
        "metric": ranking.metric,
        "baseline": None if base is None else base.name,
        "bootstrap_samples": bootstrap_samples,
        "randomisation_trials": randomisation_trials,
        "systems": [{"rank": rank, **row} for rank, row in enumerate(rows, 1)],
        "differences": differences,
        "comparisons": len(tested),
        "runs": [
            _run_row(system, entry, base, runs[entry.name], ranking.metric)
            for system in systems
            for entry in system.entries
        ],
        "examples": example_sentences(systems, field, held_out, examples, sentences),
    }


def _system_row(system: System, runs: Mapping[str, RunScores], field: Field, held_out: HeldOut) -> Comparison:
    """A row of the ranked table, with the lines of its charts. Means are over the seeds."""
    entries = system.entries
    row: Comparison = {"name": system.name, "seeds": [entry.seed for entry in entries if entry.seed is not None]}
    for metric in field.metrics:
        values = [runs[entry.name].scores[metric] for entry in entries]
        row |= {metric: fmean(values), f"{metric}_sd": stdev(values) if len(values) > 1 else None}
    row |= field.spread(system)
    measures: dict[str, Callable[[Entry], float | None]] = {
        "aer": lambda entry: entry.aer,
        "parameters": lambda entry: entry.parameters,
        "seconds": lambda entry: entry.training.get("seconds"),
        "epoch_seconds": lambda entry: entry.epoch_seconds,
        "tokens_per_second": lambda entry: entry.training.get("target_tokens_per_second"),
        "sentences_per_second": lambda entry: entry.sentences_per_second,
    }
    for key, measure in measures.items():
        known = [value for entry in entries if (value := measure(entry)) is not None]
        row[key] = fmean(known) if known else None
    if row["parameters"] is not None:
        row["parameters"] = round(row["parameters"])
    row = _all_rounded(row)
    by_length = [_bleu_by_length(field.counts(entry), held_out) for entry in entries]
    row["bleu_by_length"] = [
        {**bucket[0], "bleu": _rounded(fmean(part["bleu"] for part in bucket))}
        for bucket in zip(*by_length, strict=True)
    ]
    row["curve"] = _mean_curve([entry.curve for entry in entries])
    return row | system_figures([entry.explained for entry in entries])


def _bleu_by_length(counts: Counts, held_out: HeldOut) -> list[Comparison]:
    """BLEU in parts of the test set, by source length, from its statistics (N, 10)."""
    parts = min(MAX_BUCKETS, max(1, len(held_out.references) // MIN_BUCKET))
    return score_by_length(counts, held_out.sources, parts)


def _run_row(system: System, entry: Entry, baseline: System | None, found: RunScores, metric: Metric) -> Comparison:
    row: Comparison = {"system": system.name, "seed": entry.seed, "run": entry.name}
    for name, value in found.scores.items():
        row |= {name: value, f"{name}_ci": found.intervals[name]}
    row = _all_rounded({**row, "aer": entry.aer})
    others = [name for name in found.scores if name != metric]
    row |= {
        "p_bootstrap": found.p_bootstrap.get(metric),
        "p_randomisation": found.p_randomisation.get(metric),
        **{f"{name}_p_bootstrap": found.p_bootstrap.get(name) for name in others},
        **{f"{name}_p_randomisation": found.p_randomisation.get(name) for name in others},
        "baseline_run": None if baseline in (None, system) else baseline.of_seed(entry.seed).name,
    }
    return row | run_figures(entry.explained)


def _mean_curve(curves: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean at each epoch, over the runs with a validation there."""
    points: dict[float, list[float]] = {}
    for curve in curves:
        for epoch, value in curve:
            points.setdefault(epoch, []).append(value)
    return [(epoch, _rounded(fmean(values))) for epoch, values in sorted(points.items())]


def _rounded(value: Any) -> Any:  # noqa: ANN401
    return round(value, 4) if isinstance(value, float) else value


def _all_rounded(row: Mapping[str, Any]) -> Comparison:
    """Scores have 4 decimals, p values more: Holm's correction multiplies them."""
    return {key: value if key.startswith("p") else _rounded(value) for key, value in row.items()}
