"""Group runs into systems, score and test them on one test set. Results are plain values, for tables and the page."""

import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from tqdm import tqdm

from nmt.comparison import faithfulness
from nmt.comparison.entry import Entry, HeldOut
from nmt.comparison.ranking import Ranking
from nmt.config.compose import PATH_KEYS
from nmt.config.errors import UserError, printable
from nmt.config.overrides import user_path
from nmt.config.schema import Metric
from nmt.files import read_lines
from nmt.metrics.bleu import score_by_length, sentence_bleu, signatures
from nmt.metrics.significance import MetricResult, Significance
from nmt.report.table import short

MIN_BUCKET, MAX_BUCKETS = 50, 8  # BLEU by length: at least 50 sentences per bucket, at most 8 buckets
DEFAULT = Ranking()
PERCENT = 100  # the largest attention weight
log = logging.getLogger(__name__)

Comparison = dict[str, Any]


@dataclass(frozen=True)
class System:
    """The runs of one configuration, which differ only in their seed."""

    name: str
    entries: list[Entry]

    def of_seed(self, seed: int | None) -> Entry:
        """The entry with this seed, else the first."""
        return next((entry for entry in self.entries if entry.seed == seed), self.entries[0])


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
    """Score and rank systems, and test each run against the baseline's run of the same seed, or its first.

    `baseline` is the name of a system (None: the best). `sentences` are the numbers of example sentences, from 1; if
    empty, `examples` sentences are chosen. docs/run.md describes the result. Raises UserError if one is out of range.
    """
    counts = bootstrap_samples, randomisation_trials
    others = ranking.sentence_metrics(held_out)
    significance = Significance(held_out.references, held_out.settings, *counts, others)
    metric, sign = ranking.metric, ranking.sign
    base = next((system for system in systems if system.name == baseline), None)
    if base is None:
        base = max(
            systems, key=lambda system: sign * fmean(significance.score(e.hypotheses, metric) for e in system.entries)
        )
    results = _test(systems, base, significance)
    systems = sorted(systems, key=lambda system: -sign * fmean(results[e.name][metric].score for e in system.entries))
    rows = [_system_row(system, results, held_out, metric, base) for system in systems]
    return {
        "split": split,
        "sentences": len(held_out.references),
        **signatures(held_out.settings),
        "metric": metric,
        "baseline": base.name,
        "bootstrap_samples": bootstrap_samples,
        "randomisation_trials": randomisation_trials,
        "systems": [{"rank": rank, **row} for rank, row in enumerate(rows, 1)],
        "runs": [
            _run_row(system, entry, base, results[entry.name], metric) for system in systems for entry in system.entries
        ],
        "examples": _examples(systems, held_out, examples, sentences),
    }


def _test(
    systems: Sequence[System], baseline: System, significance: Significance
) -> dict[str, dict[str, MetricResult]]:
    """Results by entry and metric."""
    results: dict[str, dict[str, MetricResult]] = {}
    entries = [(system, entry) for system in systems for entry in system.entries]
    for system, entry in tqdm(entries, "score", unit=" runs", disable=None, leave=False):
        if system is baseline:
            (results[entry.name],) = significance(entry.hypotheses, [])
        else:
            base = baseline.of_seed(entry.seed)
            _, results[entry.name] = significance(base.hypotheses, [entry.hypotheses])
    return results


def _system_row(
    system: System, results: dict[str, dict[str, MetricResult]], held_out: HeldOut, metric: Metric, baseline: System
) -> Comparison:
    """A row of the ranked table, with the lines of its charts. Means are over the seeds."""
    entries = system.entries
    scores = [results[entry.name] for entry in entries]
    row: Comparison = {"name": system.name, "seeds": [entry.seed for entry in entries if entry.seed is not None]}
    for name in scores[0]:
        values = [score[name].score for score in scores]
        deviation = stdev(values) if len(values) > 1 else None
        row |= {name: _rounded(fmean(values)), f"{name}_sd": _rounded(deviation)}
    row[f"{metric}_ci"] = _rounded(fmean(score[metric].interval for score in scores))
    gains = [results[e.name][metric].score - results[baseline.of_seed(e.seed).name][metric].score for e in entries]
    agree = all(gain >= 0 for gain in gains) or all(gain <= 0 for gain in gains)
    for test in ("p_bootstrap", "p_randomisation"):  # of the least significant seed
        values = [getattr(score[metric], test) for score in scores]
        row[test] = None if system is baseline else max(values) if agree else 1.0
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
        row[key] = _rounded(fmean(known)) if known else None
    if row["parameters"] is not None:
        row["parameters"] = round(row["parameters"])
    by_length = [bleu_by_length(entry, held_out) for entry in entries]
    row["bleu_by_length"] = [
        {**bucket[0], "bleu": _rounded(fmean(part["bleu"] for part in bucket))}
        for bucket in zip(*by_length, strict=True)
    ]
    row["curve"] = _mean_curve([entry.curve for entry in entries])
    return row | faithfulness.of_system([entry.explained for entry in entries])


def bleu_by_length(entry: Entry, held_out: HeldOut) -> list[Comparison]:
    """BLEU in parts of the test set, by source length: those of `score_by_length`."""
    count = min(MAX_BUCKETS, max(1, len(held_out.references) // MIN_BUCKET))
    texts = held_out.references, held_out.sources, held_out.settings
    return score_by_length(entry.hypotheses, *texts, count)


def _run_row(
    system: System, entry: Entry, baseline: System, results: dict[str, MetricResult], metric: Metric
) -> Comparison:
    row: Comparison = {"system": system.name, "seed": entry.seed, "run": entry.name}
    for name, result in results.items():
        row |= {name: _rounded(result.score), f"{name}_ci": _rounded(result.interval)}
    others = [name for name in results if name != metric]
    row |= {
        "aer": None if entry.aer is None else _rounded(entry.aer),
        "p_bootstrap": results[metric].p_bootstrap,
        "p_randomisation": results[metric].p_randomisation,
        **{f"{name}_p_bootstrap": results[name].p_bootstrap for name in others},
        **{f"{name}_p_randomisation": results[name].p_randomisation for name in others},
        "baseline_run": None if system is baseline else baseline.of_seed(entry.seed).name,
    }
    return row | faithfulness.of_run(entry.explained)


def _examples(systems: Sequence[System], held_out: HeldOut, count: int, sentences: Sequence[int]) -> list[Comparison]:
    """Sentences with the translations of each system's first run. Unless `sentences` names them, half are those where
    the systems differ most and half are spread over all lengths."""
    total = len(held_out.references)
    for number in sentences:
        if number > total:
            raise UserError(f"sentences={number}: the test set has {total}")
    firsts = [(system, system.entries[0]) for system in systems]
    scores = np.array([sentence_bleu(e.hypotheses, held_out.references, held_out.settings) for _, e in firsts])
    if sentences:
        numbers = [number - 1 for number in dict.fromkeys(sentences)]
    else:
        by_length = sorted(range(total), key=lambda i: len(held_out.sources[i].split()))
        spread = [by_length[int(i)] for i in np.linspace(0, total - 1, min(total, count - count // 2))]
        rest = [int(i) for i in np.argsort(scores.min(0) - scores.max(0), kind="stable") if int(i) not in spread]
        numbers = sorted({*spread, *rest[: count // 2]})
    alignments = [_word_alignments(entry, numbers, total) for _, entry in firsts]
    return [
        {
            "number": i + 1,
            "source": held_out.sources[i],
            "reference": held_out.references[i],
            "translations": [
                {
                    "system": system.name,
                    "run": entry.name,
                    "bleu": _rounded(float(scores[row, i])),
                    "text": entry.hypotheses[i],
                    "alignment": alignments[row][i],
                }
                for row, (system, entry) in enumerate(firsts)
            ],
        }
        for i in numbers
    ]


def _word_alignments(entry: Entry, numbers: Sequence[int], total: int) -> dict[int, Comparison | None]:
    """The attention between the words of these sentences; None for a run without."""
    if entry.word_weights is None:
        return dict.fromkeys(numbers)
    lines = read_lines(entry.word_weights)
    if len(lines) != total:
        raise UserError(f"{entry.word_weights}: has {len(lines)} lines for {total} sentences; evaluate the run again")
    return {number: _parsed(entry.word_weights, number, lines[number]) for number in numbers}


def _parsed(path: Path, number: int, line: str) -> Comparison | None:
    """Words and weights in the form that the page relies on: the file may come from an untrusted source."""
    try:
        values = json.loads(line)
        if not values:
            return None
        words = {side: [str(word) for word in values[side]] for side in ("source", "target")}
        weights = [[int(weight) for weight in row] for row in values["weights"]]
        "".join(words["source"] + words["target"]).encode()
        valid = [len(row) for row in weights] == [len(words["source"])] * len(words["target"])
        valid = valid and all(0 <= weight <= PERCENT for row in weights for weight in row)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{path}, line {number + 1}: is no attention between words; evaluate the run again")
    return {**words, "weights": weights}


def _mean_curve(curves: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean at each epoch, over the runs with a validation there."""
    points: dict[float, list[float]] = {}
    for curve in curves:
        for epoch, value in curve:
            points.setdefault(epoch, []).append(value)
    return [(epoch, _rounded(fmean(values))) for epoch, values in sorted(points.items())]


def _rounded(value: Any) -> Any:  # noqa: ANN401
    return round(value, 4) if isinstance(value, float) else value
