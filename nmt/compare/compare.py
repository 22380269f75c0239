"""Group runs into systems, score and test them on one test set, and choose example sentences.

`compare` returns plain values for tables, pictures, the page and comparison.json, which docs/run.md describes.
"""

import json
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from tqdm import tqdm

from nmt.compare.entry import Entry, HeldOut, Point, System, count_sentences
from nmt.config.errors import UserError, printable, user_path
from nmt.config.schema.commands import PATH_KEYS
from nmt.evaluate import significance
from nmt.evaluate.metrics import METRICS, Counts, check_known, corpus_score, score_by_length, sign_of, signatures
from nmt.system.files import read_lines
from nmt.system.text_table import counted, short
from nmt.translate.similarity import Floats

MIN_BUCKET, MAX_BUCKETS = 50, 8  # scores by length: at least 50 sentences per bucket, at most 8 buckets
FIFTHS = 5
SIGNIFICANT = 0.05
ALL = "all"  # baseline=all: every pair of systems
TESTS = ("difference", "difference_ci", "p", "p_raw", "p_stratified", "freedom", "detectable", "seeds_needed")
log = logging.getLogger(__name__)

Comparison = dict[str, Any]
FIRST_RUNS = ("training.start_from", "objective.teachers")  # keys that name the runs a run starts or learns from


def group(entries: Sequence[Entry]) -> list[System]:
    """Group entries into systems, in the order of their first entries, named by the choices in which they differ."""
    groups: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        members = groups.setdefault(entry.config or (entry.name,), [])
        if twin := next((member for member in members if _are_dependent(member, entry)), None):
            log.warning("left out: %s has the configuration and the seed of %s", entry.name, twin.name)
        else:
            members.append(entry)
    systems = [sorted(members, key=lambda entry: (entry.seed or 0, entry.name)) for members in groups.values()]
    choices = [members[0].choices for members in systems if members[0].choices]
    # `varied` are the keys that differ between systems, without paths that differ within a system.
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


def _are_dependent(a: Entry, b: Entry) -> bool:
    """Check if two runs of a system share their seed, and the runs that they start from and learn from. An archive
    lacks the names of these runs, so it counts as dependent."""
    first = [(a.choices.get(key), b.choices.get(key)) for key in FIRST_RUNS]
    return a.seed == b.seed and not any(None not in pair and pair[0] != pair[1] for pair in first)


def _differ(key: str, choices: Iterable[Mapping[str, Any]]) -> bool:
    """Check if the values of a key differ. A missing path does not count: archives lack those of their corpus."""
    values = {str(chosen.get(key)) for chosen in choices}
    return len(values - {"None"} if key in PATH_KEYS and key not in FIRST_RUNS else values) > 1


def _name(entry: Entry, varied: Sequence[str]) -> str:
    """Name a system by its values of the `varied` keys: "bahdanau", "bahdanau encoder=lstm" or "lr=0.003".

    varied: the keys of choices in which the systems differ. A key is shortened to its part after the last dot, unless
    another one ends in the same part. A system that is not a run has no choices and keeps its own name.
    """
    choices = entry.choices
    if not entry.config:  # not a run
        return entry.name
    parts = [str(choices["attention"])] if "attention" in choices and "attention" in varied else []
    # A group keeps its whole name: attention/score@attention.score does not become "score".
    ends = [key if "/" in key else key.rpartition(".")[2] for key in varied]
    parts += [
        f"{end if ends.count(end) == 1 else key}={short(choices[key])}"
        for key, end in zip(varied, ends, strict=True)
        if key != "attention" and choices.get(key) is not None
    ]
    return printable(" ".join(parts) or str(choices.get("attention", entry.name)))


def find(name: str, systems: Sequence[System]) -> str | None:
    """Return the name of the system that is called `name` or contains the run at this path, else None."""
    path = user_path(name).resolve()
    for system in systems:
        if name == system.name or any(entry.config and Path(entry.name).resolve() == path for entry in system.entries):
            return system.name
    return None


class Statistics:
    """The sentence statistics of all runs of some systems on one test set, with the tests of their differences."""

    def __init__(
        self, systems: Sequence[System], held_out: HeldOut, metric: str, resampling: significance.Resampling
    ) -> None:
        """Compute the sentence statistics of each run. `metric` ranks the systems."""
        self.systems, self.metric, self.resampling = systems, metric, resampling
        self.sentences = len(held_out.references)
        self.outputs: dict[str, significance.Output] = {}
        entries = [entry for system in systems for entry in system.entries]
        for entry in tqdm(entries, "score", unit=" runs", disable=None, leave=False):
            self.outputs[entry.name] = count_sentences(entry, held_out).counts
        self.metrics = list(self.outputs[entries[0].name])
        self._place = {entry.name: place for place, entry in enumerate(entries)}
        self._bootstrap = {
            metric: resampling.bootstrap([output[metric] for output in self.outputs.values()], metric)
            for metric in self.metrics
        }
        self._covariance = np.atleast_2d(np.cov(self._bootstrap[metric]))
        self._seeds = significance.SeedVariance.of(
            [self._scores(system) for system in systems], [self._covariance_of(system) for system in systems]
        )

    def score(self, entry: Entry, metric: str) -> float:
        """Compute the corpus score of a run by a metric."""
        return corpus_score(self.outputs[entry.name][metric], metric)

    def counts(self, entry: Entry) -> Counts:
        """Return the statistics of each sentence of a run, (N, k), by the metric that ranks."""
        return self.outputs[entry.name][self.metric]

    def ranked(self) -> list[System]:
        """Sort the systems, the best first."""
        return sorted(self.systems, key=lambda system: -sign_of(self.metric) * fmean(self._scores(system)))

    def run_rows(self, baseline: System | None) -> list[Comparison]:
        """Score each run of the ranked systems, and test it against the baseline's run of the same seed, or else its
        first run. A key that ends in `_ci` holds half the width of the 95 % interval."""
        rows = []
        pairs = [(system, entry) for system in self.ranked() for entry in system.entries]
        others = [metric for metric in self.metrics if metric != self.metric]
        for system, entry in tqdm(pairs, "test", unit=" runs", disable=None, leave=False):
            row: Comparison = {"system": system.name, "seed": entry.seed, "run": entry.name}
            for metric in self.metrics:
                interval = significance.half_width(self._bootstrap[metric][self._place[entry.name]])
                row |= {metric: self.score(entry, metric), f"{metric}_ci": interval}
            row = _all_rounded({**row, "aer": entry.aer, "machine": entry.training.machine or None})
            base = None
            if baseline is not None and system is not baseline:
                base = next((other for other in baseline.entries if other.seed == entry.seed), baseline.entries[0])
            bootstrap, randomisation = ({}, {}) if base is None else self._paired_tests(entry, base, self.metrics)
            row |= {
                "p_bootstrap": bootstrap.get(self.metric),
                "p_randomisation": randomisation.get(self.metric),
                **{f"{metric}_p_bootstrap": bootstrap.get(metric) for metric in others},
                **{f"{metric}_p_randomisation": randomisation.get(metric) for metric in others},
                "baseline_run": None if base is None else base.name,
            }
            rows.append(row)
        return rows

    def uncertainty(self, system: System) -> dict[str, Any]:
        """Compute the uncertainty of a system's mean score: half the width of the 95 % interval (`_ci`), and the
        standard deviation of a run's score over bootstrap samples of the sentences, as a mean over the runs
        (`_sentence_sd`; s_sel of Clark et al. 2011)."""
        metric, samples = self.metric, self._bootstrap[self.metric][self._places(system)]
        scores, covariance = self._scores(system), self._covariance_of(system)
        effect = significance.mean_of_seeds(scores, covariance, self.sentences, self._seeds)
        return {
            f"{metric}_ci": effect.half_width if self._seeds.freedom else significance.half_width(samples[0]),
            f"{metric}_sentence_sd": float(samples.std(1, ddof=1).mean()),
        }

    def unequal(self) -> list[str]:
        """Name the systems whose seeds vary so much more than those of the others that their variance stands out."""
        return [system.name for system in self.ranked() if self._seeds.stands_out(self._scores(system))]

    def differences(self, baseline: System | None) -> list[dict[str, Any]]:
        """Test the score of each `system` minus that of the baseline. Without a baseline, test all pairs; the better
        system of each pair is then the `baseline` of its row. `p` is corrected for all these tests (Holm 1979)."""
        if baseline is None:
            pairs = [(worse, better) for better, worse in combinations(self.ranked(), 2)]
        else:
            pairs = [(system, baseline) for system in self.ranked() if system is not baseline]
        numbers = {system.name: number for number, system in enumerate(self.systems)}
        outputs = [[self.counts(entry) for entry in system.entries] for system in self.systems]
        indices = [(numbers[system.name], numbers[base.name]) for system, base in pairs]
        with tqdm(total=len(pairs), desc="shuffle", unit=" pairs", disable=None, leave=False) as bar:
            stratified = self.resampling.stratified_randomisation(outputs, indices, self.metric, bar.update)
        level = SIGNIFICANT / max(len(pairs), 1)  # level of significance in the first step of Holm's method
        rows: list[dict[str, Any]] = []
        for (system, base), p_stratified in zip(pairs, stratified, strict=True):
            scores, covariance = (self._scores(system), self._scores(base)), self._covariance_of(system, base)
            effect = significance.difference(*scores, covariance, self.sentences, self._seeds)
            p_raw = effect.p_value if self._seeds.freedom else self._paired_p(system.entries[0], base.entries[0])
            rows.append(
                {
                    "system": system.name,
                    "baseline": base.name,
                    "difference": effect.value,
                    "difference_ci": effect.half_width,
                    "p_raw": p_raw,
                    "p_stratified": p_stratified,
                    "freedom": effect.freedom,
                    "detectable": effect.detectable(level),
                    "seeds_needed": effect.seeds_needed(level),
                }
            )
        least = len(rows) / (1 + min(self.resampling.samples, self.resampling.trials))
        if not self._seeds.freedom and least >= SIGNIFICANT:
            log.warning(
                "with %d comparisons no p can be below %.3f: set bootstrap_samples and randomisation_trials to at "
                "least %d, or name a baseline",
                *(len(rows), least, len(rows) / SIGNIFICANT),
            )
        corrected = significance.holm([row["p_raw"] for row in rows])
        return [{**row, "p": p} for row, p in zip(rows, corrected, strict=True)]

    def letters(self, differences: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Assign letters to systems from the tests of all pairs: systems without a common letter differ."""
        names = [system.name for system in self.ranked()]
        different = [
            (names.index(row["system"]), names.index(row["baseline"])) for row in differences if row["p"] < SIGNIFICANT
        ]
        return dict(zip(names, significance.letters(len(names), different), strict=True))

    def _scores(self, system: System) -> list[float]:
        return [self.score(entry, self.metric) for entry in system.entries]

    def _places(self, *systems: System) -> list[int]:
        """List the places of the systems' runs in `_bootstrap` and `_covariance`."""
        return [self._place[entry.name] for system in systems for entry in system.entries]

    def _covariance_of(self, *systems: System) -> Floats:
        """Return the covariance (n, n) of the scores of the systems' n runs over bootstrap samples."""
        places = self._places(*systems)
        return self._covariance[np.ix_(places, places)]

    def _paired_tests(
        self, entry: Entry, base: Entry, metrics: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Compute p, by metric, of the difference between a run and `base`, by the paired bootstrap and by paired
        approximate randomisation."""
        base_outputs, outputs = (
            {metric: self.outputs[run.name][metric] for metric in metrics} for run in (base, entry)
        )
        bootstrap = {}
        for metric in metrics:
            samples = self._bootstrap[metric]
            gain = self.score(entry, metric) - self.score(base, metric)
            base_scores, scores = samples[self._place[base.name]], samples[self._place[entry.name]]
            bootstrap[metric] = significance.paired_bootstrap(base_scores, scores, gain)
        return bootstrap, self.resampling.paired_randomisation(base_outputs, outputs)

    def _paired_p(self, entry: Entry, base: Entry) -> float:
        """Return the larger p of the two paired tests, but at least the smallest p that an exact test could give."""
        metric = self.metric
        least = significance.least_p(self.outputs[base.name][metric], self.outputs[entry.name][metric])
        return max(least, *(test[metric] for test in self._paired_tests(entry, base, [metric])))


def compare(
    systems: Sequence[System],
    held_out: HeldOut,
    split: str,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    examples: int,
    sentences: Sequence[int],
    bootstrap_samples: int,
    randomisation_trials: int,
) -> Comparison:
    """Score and rank systems, and test the difference of each from the baseline. With baseline="all", test all pairs.

    `metric` ranks and is tested, by default the first metric of the runs. `baseline` is the name of a system. Without
    it, the best system is the baseline; p is then corrected for all pairs, because the tested scores have chosen the
    baseline. `sentences` are the numbers of example sentences, from 1; if it is empty, `examples` sentences are chosen.
    docs/run.md describes the result. Raises UserError for an unknown metric and for a sentence number out of range.
    """
    metrics = held_out.settings.metrics
    if metric is None:
        metric = metrics[0]
    elif metric not in metrics:
        check_known("metric", metric)
        held_out = replace(held_out, settings=replace(held_out.settings, metrics=(*metrics, metric)))
    resampling = significance.Resampling(len(held_out.references), bootstrap_samples, randomisation_trials)
    statistics = Statistics(systems, held_out, metric, resampling)
    systems = statistics.ranked()
    named = next((system for system in systems if system.name == baseline), None)
    base = None if baseline == ALL else named or systems[0]
    tested = [_all_rounded(row) for row in statistics.differences(named)]
    differences = [row for row in tested if base is None or row["baseline"] == base.name]
    budget = {  # an amount of training that every system has had, at which learning curves are compared
        "updates": _least(entry.training.updates for system in systems for entry in system.entries),
        # of the fastest system, as a mean over its seeds
        "seconds": _least(_mean(entry.training.cost for entry in system.entries) for system in systems),
    }
    rows = [_system_row(system, statistics, held_out, budget) for system in systems]
    if base is None:
        letters = statistics.letters(differences)
        rows = [{**row, "letters": letters[row["name"]]} for row in rows]
    else:
        tests = {row["system"]: {key: row[key] for key in TESTS} for row in differences}
        rows = [{**row, **tests.get(row["name"], dict.fromkeys(TESTS))} for row in rows]
    machines = sorted({entry.training.machine for system in systems for entry in system.entries} - {""})
    if len(machines) > 1:
        log.warning("the runs are of several machines (%s): times and speeds do not compare", "; ".join(machines))
    return {
        "split": split,
        "sentences": len(held_out.references),
        "signatures": dict(signatures(held_out.settings)),
        "metric": metric,
        "baseline": None if base is None else base.name,
        "bootstrap_samples": bootstrap_samples,
        "randomisation_trials": randomisation_trials,
        "budget": _all_rounded(budget),
        "machines": machines,
        "systems": [{"rank": rank, **row} for rank, row in enumerate(rows, 1)],
        "differences": differences,
        "comparisons": len(tested),
        "unequal": statistics.unequal(),
        "runs": statistics.run_rows(base),
        "examples": example_sentences(systems, statistics, held_out, examples, sentences),
    }


def _score_after(curve: Sequence[Point], updates: float | None) -> float | None:
    """Read the score after this number of updates from a learning curve, linear between validations and constant after
    the last one; None before the first one."""
    if updates is None or not curve or updates < curve[0].updates:
        return None
    return float(np.interp(updates, [point.updates for point in curve], [point.score for point in curve]))


def _mean(values: Iterable[float | None]) -> float | None:
    """Average the values that are not None; return None if all are."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _system_row(system: System, statistics: Statistics, held_out: HeldOut, budget: Mapping[str, Any]) -> Comparison:
    """Compute a system's row of the ranked table, with the data of its charts. Means are over the seeds."""
    entries = system.entries
    row: Comparison = {"name": system.name, "seeds": [entry.seed for entry in entries if entry.seed is not None]}
    for metric in statistics.metrics:
        values = [statistics.score(entry, metric) for entry in entries]
        row |= {metric: fmean(values), f"{metric}_sd": stdev(values) if len(values) > 1 else None}
    row |= statistics.uncertainty(system)
    measures: dict[str, Callable[[Entry], float | None]] = {
        "aer": lambda entry: entry.aer,
        "perplexity": lambda entry: entry.training.perplexity,
        "parameters": lambda entry: entry.parameters,
        "update_milliseconds": lambda entry: entry.training.update_seconds and 1000 * entry.training.update_seconds,
        "cost_seconds": lambda entry: entry.training.cost,
        "seconds": lambda entry: entry.training.seconds,
        "tokens_per_second": lambda entry: entry.training.tokens_per_second,
        "sentences_per_second": lambda entry: entry.sentences_per_second,
    }
    update_seconds = _mean(entry.training.update_seconds for entry in entries)
    curve = _mean_curve(entries, statistics.metric)
    row |= {key: _mean(map(measure, entries)) for key, measure in measures.items()}
    in_time = budget["seconds"] / update_seconds if budget["seconds"] and update_seconds else None
    row |= {"equal_updates": _score_after(curve, budget["updates"]), "equal_time": _score_after(curve, in_time)}
    if row["parameters"] is not None:
        row["parameters"] = round(row["parameters"])
    row = _all_rounded(row)
    parts = min(MAX_BUCKETS, max(1, len(held_out.references) // MIN_BUCKET))
    row["by_length"] = _by_length(entries, statistics, held_out.sources, parts)
    longest = _by_length(entries, statistics, held_out.sources, FIFTHS)[-1]
    row |= {"longest": longest["score"], "longest_words": longest["words"]}
    row["curve"] = []
    for point in curve:
        seconds = None if update_seconds is None else point.updates * update_seconds
        row["curve"].append(_all_rounded({**point._asdict(), "seconds": seconds}))
    return row


def _by_length(
    entries: Sequence[Entry], statistics: Statistics, sources: Sequence[str], parts: int
) -> list[Comparison]:
    """Compute the mean score of runs for up to `parts` ranges of source length."""
    runs = (score_by_length(statistics.counts(entry), statistics.metric, sources, parts) for entry in entries)
    return [
        {**bucket[0], "score": _rounded(fmean(part["score"] for part in bucket))} for bucket in zip(*runs, strict=True)
    ]


def _mean_curve(entries: Sequence[Entry], metric: str) -> list[Point]:
    """Average the learning curves of runs, linear between validations, from where all of them have begun."""
    curves = [curve for entry in entries if (curve := entry.training.curve(metric))]
    epochs = {point.updates: point.epoch for curve in curves for point in curve}
    begin = max((curve[0].updates for curve in curves), default=0)
    return [
        Point(updates, epoch, fmean(_score_after(curve, updates) or 0.0 for curve in curves))
        for updates, epoch in sorted(epochs.items())
        if updates >= begin
    ]


def _rounded(value: Any) -> Any:  # noqa: ANN401
    return round(value, 4) if isinstance(value, float) else value


def _all_rounded(row: Mapping[str, Any]) -> Comparison:
    """Round all values to 4 decimals, except p values."""
    return {key: value if key == "p" or key.startswith("p_") else _rounded(value) for key, value in row.items()}


def example_sentences(
    systems: Sequence[System], statistics: Statistics, held_out: HeldOut, count: int, sentences: Sequence[int]
) -> list[dict[str, Any]]:
    """Collect the translations and word attention of example sentences from the first run of each system.

    Without `sentences`, `count` are chosen: half of them where the systems differ most, the other half spread over all
    lengths. Raises UserError if a number in `sentences` is out of range.
    """
    total = len(held_out.references)
    for number in sentences:
        if number > total:
            raise UserError(f"sentences={number}: the held-out set has {total}")
    firsts = [(system, system.entries[0]) for system in systems]
    scores = np.array([METRICS[statistics.metric].of_sentences(statistics.counts(entry)) for _, entry in firsts])
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
                    "score": round(float(scores[row, i]), 4),
                    "text": entry.hypotheses[i],
                    "alignment": alignments[row][i],
                }
                for row, (system, entry) in enumerate(firsts)
            ],
        }
        for i in numbers
    ]


def _word_alignments(entry: Entry, numbers: Sequence[int], total: int) -> dict[int, dict[str, Any] | None]:
    """Read the attention between words, by sentence index; None for a sentence without any."""
    if entry.word_weights is None:
        return dict.fromkeys(numbers)
    lines = read_lines(entry.word_weights)
    try:
        if len(lines) != total:
            raise ValueError(f"{counted(len(lines), 'line')} for {counted(total, 'sentence')}")
        return {number: _parsed(lines[number]) for number in numbers}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{entry.word_weights}: is damaged ({type(error).__name__}: {error}); evaluate the run again"
        ) from None


def _parsed(line: str) -> dict[str, Any] | None:
    """Parse the words and the attention weights of a sentence, and check them: the file may come from a stranger."""
    values = json.loads(line)
    if not values:
        return None
    words = {side: [printable(str(word)) for word in values[side]] for side in ("source", "target")}
    weights = [[int(weight) for weight in row] for row in values["weights"]]
    if [len(row) for row in weights] != [len(words["source"])] * len(words["target"]):
        raise ValueError("a row has another number of weights than there are words")
    return {**words, "weights": weights}
