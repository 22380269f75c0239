"""From outputs on one test set to everything that the tables and the page show, as plain values."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nmt.comparison.entry import Entry, HeldOut
from nmt.comparison.system import System
from nmt.config.errors import UserError
from nmt.files import read_lines
from nmt.metrics.bleu import METRICS, score_by_length, sentence_bleu, signatures
from nmt.metrics.significance import MetricResult, Significance

LEAST_OF_A_BUCKET = 50  # sentences: BLEU of fewer says little
MOST_BUCKETS = 8
PERCENT = 100  # the largest weight

Comparison = dict[str, Any]


def compare(
    systems: Sequence[System],
    held_out: HeldOut,
    split: str,
    *,
    baseline: str | None = None,
    examples: int,
    sentences: Sequence[int],
    bootstrap_samples: int,
    randomisation_trials: int,
) -> Comparison:
    """Score and rank all, and test each against the baseline: of the same seed where it has one.

    `baseline` is the name of one of the systems, None takes the best; `sentences` are the numbers of examples, counted
    from 1, empty chooses `examples` of them. The result is described in docs/run.md. Raises UserError for a sentence
    that there is not.
    """
    significance = Significance(held_out.references, held_out.settings, bootstrap_samples, randomisation_trials)
    named = [system for system in systems if system.name == baseline]
    chosen = named[0] if named else _best(systems, significance)
    tested = _test(systems, chosen, significance)
    systems = sorted(systems, key=lambda system: -_mean(tested[e.name]["bleu"].score for e in system.entries))
    count = min(MOST_BUCKETS, max(1, len(held_out.references) // LEAST_OF_A_BUCKET))
    rows = [_system(system, tested, held_out, count, system is chosen) for system in systems]
    return {
        "split": split,
        "sentences": len(held_out.references),
        **signatures(held_out.settings),
        "baseline": chosen.name,
        "bootstrap_samples": bootstrap_samples,
        "randomisation_trials": randomisation_trials,
        "systems": [{"rank": rank, **row} for rank, row in enumerate(rows, 1)],
        "runs": [_run(system, entry, chosen, tested[entry.name]) for system in systems for entry in system.entries],
        "examples": _examples(systems, held_out, examples, sentences),
    }


def _best(systems: Sequence[System], significance: Significance) -> System:
    return max(systems, key=lambda system: _mean(significance.bleu(entry.hypotheses) for entry in system.entries))


def _test(
    systems: Sequence[System], baseline: System, significance: Significance
) -> dict[str, dict[str, MetricResult]]:
    """By entry and metric."""
    tested: dict[str, dict[str, MetricResult]] = {}
    for entry in tqdm(
        [e for system in systems for e in system.entries], "score", unit=" runs", disable=None, leave=False
    ):
        if any(entry is its for its in baseline.entries):
            (tested[entry.name],) = significance(entry.hypotheses, [])
        else:
            base = baseline.of_seed(entry.seed)
            _, tested[entry.name] = significance(base.hypotheses, [entry.hypotheses])
    return tested


def _system(
    system: System, tested: dict[str, dict[str, MetricResult]], held_out: HeldOut, buckets: int, is_baseline: bool
) -> Comparison:
    """A line of the ranked table, with the lines of its charts. Means are over the seeds."""
    entries = system.entries
    scores = [tested[entry.name] for entry in entries]
    row: Comparison = {"name": system.name, "seeds": [entry.seed for entry in entries if entry.seed is not None]}
    for metric in METRICS:
        values = [score[metric].score for score in scores]
        row |= {metric: _rounded(_mean(values)), f"{metric}_sd": _rounded(_deviation(values))}
    row["bleu_ci"] = _rounded(_mean(score["bleu"].interval for score in scores))
    for test in ("p_bootstrap", "p_randomisation"):  # the least sure of the seeds
        row[test] = None if is_baseline else max(getattr(score["bleu"], test) for score in scores)
    known: dict[str, Callable[[Entry], float | None]] = {
        "aer": lambda entry: entry.aer,
        "parameters": lambda entry: entry.parameters,
        "seconds": lambda entry: entry.training.get("seconds"),
        "epoch_seconds": _epoch_seconds,
        "tokens_per_second": lambda entry: entry.training.get("target_tokens_per_second"),
        "sentences_per_second": lambda entry: entry.sentences_per_second,
    }
    for key, value in known.items():
        values = [found for entry in entries if (found := value(entry)) is not None]
        row[key] = _rounded(_mean(values)) if values else None
    if row["parameters"] is not None:
        row["parameters"] = round(row["parameters"])
    texts = held_out.references, held_out.sources, held_out.settings
    parts = [score_by_length(entry.hypotheses, *texts, buckets) for entry in entries]
    row["bleu_by_length"] = [
        {**same[0], "bleu": _rounded(_mean(part["bleu"] for part in same))} for same in zip(*parts, strict=True)
    ]
    row["curve"] = _mean_curve([entry.curve for entry in entries])
    return row


def _run(system: System, entry: Entry, baseline: System, tested: dict[str, MetricResult]) -> Comparison:
    row: Comparison = {"system": system.name, "seed": entry.seed, "run": entry.name}
    for metric, found in tested.items():
        row |= {metric: _rounded(found.score), f"{metric}_ci": _rounded(found.interval)}
    row |= {
        "aer": None if entry.aer is None else _rounded(entry.aer),
        "p_bootstrap": tested["bleu"].p_bootstrap,
        "p_randomisation": tested["bleu"].p_randomisation,
        **{f"{metric}_p_bootstrap": tested[metric].p_bootstrap for metric in METRICS[1:]},
        **{f"{metric}_p_randomisation": tested[metric].p_randomisation for metric in METRICS[1:]},
        "baseline_run": None if system is baseline else baseline.of_seed(entry.seed).name,
    }
    return row


def _examples(systems: Sequence[System], held_out: HeldOut, count: int, wanted: Sequence[int]) -> list[Comparison]:
    """Sentences with the translations of every system's first run: those that are wanted, else half of them where the
    systems differ most and half spread over all lengths."""
    total = len(held_out.references)
    for number in wanted:
        if number > total:
            raise UserError(f"sentences={number}: the test set has {total}")
    firsts = [(system, system.entries[0]) for system in systems]
    scores = np.array([sentence_bleu(e.hypotheses, held_out.references, held_out.settings) for _, e in firsts])
    if wanted:
        numbers = [number - 1 for number in dict.fromkeys(wanted)]
    else:
        by_length = sorted(range(total), key=lambda i: len(held_out.sources[i].split()))
        spread = [by_length[int(i)] for i in np.linspace(0, total - 1, min(total, count - count // 2))]
        rest = [int(i) for i in np.argsort(scores.min(0) - scores.max(0), kind="stable") if int(i) not in spread]
        numbers = sorted({*spread, *rest[: count // 2]})
    weights = [_word_weights(entry, numbers, total) for _, entry in firsts]
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
                    "alignment": weights[row][i],
                }
                for row, (system, entry) in enumerate(firsts)
            ],
        }
        for i in numbers
    ]


def _word_weights(entry: Entry, numbers: Sequence[int], total: int) -> dict[int, Comparison | None]:
    """The attention between the words of these sentences; None where there is none."""
    if entry.word_weights is None:
        return dict.fromkeys(numbers)
    lines = read_lines(entry.word_weights)
    if len(lines) != total:
        raise UserError(f"{entry.word_weights}: has {len(lines)} lines for {total} sentences; evaluate the run again")
    return {number: _checked(entry.word_weights, number, lines[number]) for number in numbers}


def _checked(path: Path, number: int, line: str) -> Comparison | None:
    """What a run may have brought from elsewhere is of the form that the page relies on."""
    try:
        found = json.loads(line)
        if not found:
            return None
        alignment = {side: [str(word) for word in found[side]] for side in ("source", "target")}
        weights = [[int(weight) for weight in row] for row in found["weights"]]
        "".join(alignment["source"] + alignment["target"]).encode()
        fits = [len(row) for row in weights] == [len(alignment["source"])] * len(alignment["target"])
        fits = fits and all(0 <= weight <= PERCENT for row in weights for weight in row)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        fits = False
    if not fits:
        raise UserError(f"{path}, line {number + 1}: is no attention between words; evaluate the run again")
    return {**alignment, "weights": weights}


def _epoch_seconds(entry: Entry) -> float | None:
    if not entry.training.get("epochs") or not entry.training.get("seconds"):
        return None
    return entry.training["seconds"] / entry.training["epochs"]


def _mean_curve(curves: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean at each epoch of the runs that were validated there."""
    points: dict[float, list[float]] = {}
    for curve in curves:
        for epoch, value in curve:
            points.setdefault(epoch, []).append(value)
    return [(epoch, _rounded(_mean(values))) for epoch, values in sorted(points.items())]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample, None of one."""
    return statistics.stdev(values) if len(values) > 1 else None


def _rounded(value: Any) -> Any:  # noqa: ANN401
    return round(value, 4) if isinstance(value, float) else value
