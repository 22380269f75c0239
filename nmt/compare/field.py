"""Score the runs of a field of systems and test their differences, each run and each system."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
from tqdm import tqdm

from nmt.compare.entry import Entry, HeldOut, System, count_sentences
from nmt.compare.page import SIGNIFICANT
from nmt.compare.ranking import Ranking
from nmt.evaluate.bleu import Counts
from nmt.evaluate.significance import (
    Effect,
    Output,
    Resampling,
    corpus_score,
    difference,
    half_width,
    holm,
    letters,
    mean_of_seeds,
    paired_bootstrap,
)


@dataclass(frozen=True)
class RunScores:
    """A run's scores by metric, tested against one run of the baseline."""

    scores: Mapping[str, float]
    intervals: Mapping[str, float]  # half the width of the 95 % interval
    p_bootstrap: Mapping[str, float]  # empty for the baseline's own runs
    p_randomisation: Mapping[str, float]


class Field:
    """Systems on one test set, with the sentence statistics of all their runs."""

    def __init__(self, systems: Sequence[System], held_out: HeldOut, ranking: Ranking, resampling: Resampling) -> None:
        """Counts the sentences of each run, or reads the counts that its evaluation left beside it."""
        self.systems, self.ranking, self.resampling = systems, ranking, resampling
        self.sentences = len(held_out.references)
        self.outputs: dict[str, Output] = {}
        entries = [entry for system in systems for entry in system.entries]
        for entry in tqdm(entries, "score", unit=" runs", disable=None, leave=False):
            self.outputs[entry.name] = {
                **count_sentences(entry, held_out).counts,
                **ranking.sentence_scores(entry.hypotheses, held_out),
            }
        self.metrics = list(self.outputs[entries[0].name])
        self._rows = {entry.name: row for row, entry in enumerate(entries)}
        self._bootstrap = {
            metric: resampling.bootstrap([output[metric] for output in self.outputs.values()], metric)
            for metric in self.metrics
        }
        self._covariance = np.atleast_2d(np.cov(self._bootstrap[ranking.metric]))

    def score(self, entry: Entry, metric: str) -> float:
        """A run's score."""
        return corpus_score(self.outputs[entry.name][metric], metric)

    def mean(self, system: System) -> float:
        """The mean of a system's runs, by the metric that ranks."""
        return fmean(self._scores(system))

    def counts(self, entry: Entry) -> Counts:
        """The statistics of a run's BLEU (N, 10)."""
        return self.outputs[entry.name]["bleu"]  # type: ignore[return-value]

    def ranked(self) -> list[System]:
        """The systems, the best first."""
        return sorted(self.systems, key=lambda system: -self.ranking.sign * self.mean(system))

    def run_scores(self, baseline: System | None) -> dict[str, RunScores]:
        """Each run by its name, tested against the baseline's run of the same seed, or its first."""
        found = {}
        pairs = [(system, entry) for system in self.systems for entry in system.entries]
        for system, entry in tqdm(pairs, "test", unit=" runs", disable=None, leave=False):
            row, output = self._rows[entry.name], self.outputs[entry.name]
            scores = {metric: self.score(entry, metric) for metric in self.metrics}
            intervals = {metric: half_width(self._bootstrap[metric][row]) for metric in self.metrics}
            bootstrap: dict[str, float] = {}
            randomisation: dict[str, float] = {}
            if baseline is not None and system is not baseline:
                base = baseline.of_seed(entry.seed)
                randomisation = self.resampling.paired_randomisation(self.outputs[base.name], output)
                bootstrap = {
                    metric: paired_bootstrap(
                        self._bootstrap[metric][self._rows[base.name]],
                        self._bootstrap[metric][row],
                        value - self.score(base, metric),
                    )
                    for metric, value in scores.items()
                }
            found[entry.name] = RunScores(scores, intervals, bootstrap, randomisation)
        return found

    def spread(self, system: System) -> dict[str, Any]:
        """By the metric that ranks: half the width of a system's 95 % interval, and `_sentence_sd`, the standard
        deviation of a run's score between bootstrap samples of the sentences (s_sel of Clark et al. 2011)."""
        metric, scores, rows = self.ranking.metric, self._scores(system), self._of(system)
        samples = self._bootstrap[metric][rows]
        effect = mean_of_seeds(scores, self._covariance[np.ix_(rows, rows)], self.sentences) if len(rows) > 1 else None
        return {
            f"{metric}_ci": half_width(samples[0]) if effect is None else effect.half_width,
            f"{metric}_sentence_sd": float(samples.std(1, ddof=1).mean()),
        }

    def differences(self, baseline: System | None) -> list[dict[str, Any]]:
        """The score of each `system` minus that of the `baseline`, with p corrected for all of them by Holm's method.

        Without a baseline, of all pairs: the better system of each is its `baseline`.
        """
        if baseline is None:
            pairs = [(worse, better) for better, worse in combinations(self.ranked(), 2)]
        else:
            pairs = [(system, baseline) for system in self.ranked() if system is not baseline]
        stratified = self._stratified(pairs)
        effects = [self._effect(system, base) for system, base in pairs]
        level = SIGNIFICANT / max(len(pairs), 1)  # of Holm's first step
        rows: list[dict[str, Any]] = []
        for (system, base), effect, dealt in zip(pairs, effects, stratified, strict=True):
            paired = self._paired(system, base) if len(system.entries) == len(base.entries) == 1 else None
            rows.append(
                {
                    "system": system.name,
                    "baseline": base.name,
                    "difference": effect.value,
                    "difference_ci": effect.half_width,
                    "p_raw": effect.p_value if paired is None else max(paired),
                    "p_stratified": dealt,
                    "freedom": effect.freedom,
                    "detectable": effect.detectable(level),
                    "seeds_needed": effect.seeds_needed(level),
                }
            )
        corrected = holm([row["p_raw"] for row in rows])
        return [{**row, "p": p} for row, p in zip(rows, corrected, strict=True)]

    def letters(self, differences: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Letters by system from the differences of all pairs: systems without a common letter differ."""
        names = [system.name for system in self.ranked()]
        different = [
            (names.index(row["system"]), names.index(row["baseline"])) for row in differences if row["p"] < SIGNIFICANT
        ]
        return dict(zip(names, letters(len(names), different), strict=True))

    def _scores(self, system: System) -> list[float]:
        return [self.score(entry, self.ranking.metric) for entry in system.entries]

    def _of(self, *systems: System) -> list[int]:
        return [self._rows[entry.name] for system in systems for entry in system.entries]

    def _effect(self, system: System, base: System) -> Effect:
        rows = self._of(system, base)
        covariance = self._covariance[np.ix_(rows, rows)]
        return difference(self._scores(system), self._scores(base), covariance, self.sentences)

    def _paired(self, system: System, base: System) -> tuple[float, float]:
        """Both paired tests of two systems with one run each."""
        metric: str = self.ranking.metric
        outputs = [{metric: self.outputs[each.entries[0].name][metric]} for each in (base, system)]
        samples = self._bootstrap[metric][self._of(base, system)]
        gain = self.mean(system) - self.mean(base)
        randomisation = self.resampling.paired_randomisation(outputs[0], outputs[1])
        return paired_bootstrap(samples[0], samples[1], gain), randomisation[metric]

    def _stratified(self, pairs: Sequence[tuple[System, System]]) -> list[float]:
        metric, numbers = self.ranking.metric, {system.name: row for row, system in enumerate(self.systems)}
        outputs = [[self.outputs[entry.name][metric] for entry in system.entries] for system in self.systems]
        indices = [(numbers[a.name], numbers[b.name]) for a, b in pairs]
        with tqdm(total=len(pairs), desc="shuffle", unit=" pairs", disable=None, leave=False) as bar:
            return self.resampling.stratified_randomisation(outputs, indices, metric, bar.update)
