"""From outputs on one test set to everything that the tables and the page show, as plain values."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nmt.comparison.entry import Entry, HeldOut
from nmt.comparison.system import System, group
from nmt.config.errors import UserError, nearest
from nmt.metrics.bleu import METRICS, score_by_length, sentence_bleu, signatures
from nmt.metrics.significance import Significance, Tested
from nmt.run import read_lines

LEAST_OF_A_BUCKET = 50  # sentences: BLEU of fewer says little
MOST_BUCKETS = 8

Comparison = dict[str, Any]


def compare(
    entries: Sequence[Entry],
    test_set: HeldOut,
    split: str,
    *,
    baseline: str | None = None,
    examples: int = 12,
    sentences: Sequence[int] = (),
    bootstrap_samples: int = 1000,
    randomisation_trials: int = 10000,
) -> Comparison:
    """Score and rank all, and test each against the baseline: of the same seed where it has one.

    `baseline` names a system or a run, None takes the best; `sentences` are the numbers of examples, counted from 1,
    empty chooses `examples` of them. The result is described in README.md. Raises UserError for an unknown baseline or
    sentence.
    """
    systems = group(entries)
    significance = Significance(test_set.references, test_set.settings, bootstrap_samples, randomisation_trials)
    chosen = _find(baseline, systems) if baseline is not None else _best(systems, significance)
    tested = _test(systems, chosen, significance)
    systems.sort(key=lambda system: -_mean(tested[entry.name]["bleu"].score for entry in system.entries))
    count = min(MOST_BUCKETS, max(1, len(test_set.references) // LEAST_OF_A_BUCKET))
    rows = [_system(system, tested, test_set, count, system is chosen) for system in systems]
    return {
        "split": split,
        "sentences": len(test_set.references),
        **signatures(test_set.settings),
        "baseline": chosen.name,
        "bootstrap_samples": bootstrap_samples,
        "randomisation_trials": randomisation_trials,
        "systems": [{"rank": rank, **row} for rank, row in enumerate(rows, 1)],
        "runs": [_run(system, entry, chosen, tested[entry.name]) for system in systems for entry in system.entries],
        "examples": _examples(systems, test_set, examples, sentences),
    }


def _find(name: str, systems: Sequence[System]) -> System:
    for system in systems:
        if name == system.name or any(name.rstrip("/") == entry.name for entry in system.entries):
            return system
    names = [system.name for system in systems]
    raise UserError(f"baseline={name}: not one of {', '.join(names)}{nearest(name, names)}")


def _best(systems: Sequence[System], significance: Significance) -> System:
    return max(systems, key=lambda system: _mean(significance.bleu(entry.hypotheses) for entry in system.entries))


def _test(systems: Sequence[System], baseline: System, significance: Significance) -> dict[str, dict[str, Tested]]:
    """By entry and metric. All that meet the same entry of the baseline are tested in one go."""
    tested: dict[str, dict[str, Tested]] = {}
    for base in baseline.entries:
        others = [e for s in systems if s is not baseline for e in s.entries if baseline.of_seed(e.seed) is base]
        scores = significance(base.hypotheses, [entry.hypotheses for entry in others])
        tested |= {entry.name: score for entry, score in zip([base, *others], scores, strict=True)}
    return tested


def _system(
    system: System, tested: dict[str, dict[str, Tested]], test_set: HeldOut, buckets: int, is_baseline: bool
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
    texts = test_set.references, test_set.sources, test_set.settings
    parts = [score_by_length(entry.hypotheses, *texts, buckets) for entry in entries]
    row["bleu_by_length"] = [
        {**same[0], "bleu": _rounded(_mean(part["bleu"] for part in same))} for same in zip(*parts, strict=True)
    ]
    row["curve"] = _mean_curve([entry.curve for entry in entries])
    return row


def _run(system: System, entry: Entry, baseline: System, tested: dict[str, Tested]) -> Comparison:
    row: Comparison = {"system": system.name, "seed": entry.seed, "run": entry.name}
    for metric, found in tested.items():
        row |= {metric: _rounded(found.score), f"{metric}_ci": _rounded(found.interval)}
    row |= {
        "aer": None if entry.aer is None else _rounded(entry.aer),
        "p_bootstrap": tested["bleu"].p_bootstrap,
        "p_randomisation": tested["bleu"].p_randomisation,
        "baseline_run": None if system is baseline else baseline.of_seed(entry.seed).name,
    }
    return row


def _examples(systems: Sequence[System], test_set: HeldOut, count: int, wanted: Sequence[int]) -> list[Comparison]:
    """Sentences with the translations of every system's first run: those that are wanted, else half of them where the
    systems differ most and half spread over all lengths."""
    total = len(test_set.references)
    for number in wanted:
        if number > total:
            raise UserError(f"sentences={number}: the test set has {total}")
    firsts = [(system, system.entries[0]) for system in systems]
    scores = np.array([sentence_bleu(e.hypotheses, test_set.references, test_set.settings) for _, e in firsts])
    if wanted:
        numbers = [number - 1 for number in wanted]
    else:
        by_length = sorted(range(total), key=lambda i: len(test_set.sources[i].split()))
        spread = [by_length[int(i)] for i in np.linspace(0, total - 1, min(total, count - count // 2))]
        rest = [int(i) for i in np.argsort(scores.min(0) - scores.max(0), kind="stable") if int(i) not in spread]
        numbers = sorted({*spread, *rest[: count // 2]})
    weights = [_word_weights(entry, total) for _, entry in firsts]
    return [
        {
            "number": i + 1,
            "source": test_set.sources[i],
            "reference": test_set.references[i],
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


def _word_weights(entry: Entry, total: int) -> list[Comparison | None]:
    """The attention between the words of each sentence; None where there is none."""
    if entry.word_weights is None:
        return [None] * total
    found = [json.loads(line) or None for line in read_lines(entry.word_weights)]
    if len(found) != total:
        raise UserError(f"{entry.word_weights}: has {len(found)} lines for {total} sentences; evaluate the run again")
    return found


def _epoch_seconds(entry: Entry) -> float | None:
    if not entry.training.get("epochs") or not entry.training.get("seconds"):
        return None
    return entry.training["seconds"] / entry.training["epochs"]


def _mean_curve(curves: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean at the epochs that all have; a run that stopped early leaves the rest to the others."""
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
