"""Significance of score differences: sacreBLEU's confidence intervals and paired tests.

Paired bootstrap resampling (Koehn 2004) and paired approximate randomisation (Riezler and Maxwell 2005), with the
results of `sacrebleu --paired-bs` and `--paired-ar`. The same for metrics that are means of sentence scores, such as
COMET. And Student's interval of a mean over seeds.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from nmt.metrics.bleu import METRICS, ScoreSettings, bleu_metric, nfc

SentenceMetric = Callable[[Sequence[str]], Sequence[float]]
"""The scores of an output's sentences."""


class MetricResult(NamedTuple):
    """A system's score by one metric, tested against the baseline."""

    score: float
    interval: float  # half the width of the 95 % confidence interval
    p_bootstrap: float | None  # None for the baseline itself
    p_randomisation: float | None


class Significance:
    """Scores systems on one set of references and tests their differences. Caches the statistics of each output."""

    def __init__(
        self,
        references: Sequence[str],
        settings: ScoreSettings,
        samples: int,
        trials: int,
        sentence_metrics: Mapping[str, SentenceMetric] | None = None,
    ) -> None:
        """Number of bootstrap samples and randomisation trials. $SACREBLEU_SEED sets the seed.

        sentence_metrics: further metrics by name, each a mean of sentence scores.
        """
        self.references, self.samples, self.trials = nfc(references), samples, trials
        metrics = (bleu_metric(settings), CHRF(), TER())
        cached = [_with_cached_statistics(metric, self.references) for metric in metrics]
        self.metrics = dict(zip(METRICS, cached, strict=True))
        self.sentence_metrics = {name: _with_cached_scores(metric) for name, metric in (sentence_metrics or {}).items()}

    def __call__(self, baseline: Sequence[str], systems: Sequence[Sequence[str]]) -> list[dict[str, MetricResult]]:
        """Results of the baseline, then of each system, by metric: bleu, chrf, ter, and the sentence metrics."""
        outputs: list[tuple[str, Sequence[str]]]
        outputs = [(str(number), nfc(output)) for number, output in enumerate([baseline, *systems])]
        bootstrap, randomisation = (
            list(PairedTest(outputs, self.metrics, [self.references], kind, count)()[1].values())[1:]
            for kind, count in (("bs", self.samples), ("ar", self.trials))
        )
        results = [
            {
                metric: _result(boot[0], boot[row], randomised[row])
                for metric, boot, randomised in zip(METRICS, bootstrap, randomisation, strict=True)
            }
            for row in range(len(outputs))
        ]
        for name, sentence_metric in self.sentence_metrics.items():
            base = sentence_metric(baseline)
            results[0][name] = compare_means(base, None, self.samples, self.trials)
            for result, output in zip(results[1:], systems, strict=True):
                result[name] = compare_means(sentence_metric(output), base, self.samples, self.trials)
        return results

    def score(self, output: Sequence[str], name: str = "bleu") -> float:
        """The score by one metric, without tests."""
        if name in self.sentence_metrics:
            return fmean(self.sentence_metrics[name](output))
        metric = self.metrics[name]
        statistics = metric._extract_corpus_statistics(nfc(output), [self.references])
        return float(metric._aggregate_and_compute(statistics).score)


def compare_means(scores: Sequence[float], baseline: Sequence[float] | None, samples: int, trials: int) -> MetricResult:
    """The mean of an output's sentence scores, tested against the baseline's scores of the same sentences (n).

    With d the mean of the n differences, p is (1 + c) / (1 + N). In paired bootstrap resampling, c counts the N
    resampled means that lie at least |d| from d (the null hypothesis shifts them by d: Efron and Tibshirani 1993,
    chapter 16). In paired approximate randomisation, c counts the N means with random signs that are at least |d| in
    size. Equal outputs have p = 1.
    """
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    rng = np.random.default_rng(None if seed.lower() == "none" else int(seed))
    values = np.asarray(scores, float)
    drawn = rng.integers(len(values), size=(samples, len(values)))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    if baseline is None:
        return MetricResult(float(values.mean()), float(high - low) / 2, None, None)
    differences = values - np.asarray(baseline, float)
    observed = abs(differences.mean())
    flipped = rng.choice((-1.0, 1.0), size=(trials, len(values))) @ differences / len(values)
    shifted = differences[drawn].mean(1) - differences.mean()
    rounding = 1e-9 * np.abs(differences).max()  # sums in another order
    p_values = [
        float(1 + (np.abs(means) >= observed - rounding).sum()) / (1 + len(means)) for means in (shifted, flipped)
    ]
    return MetricResult(float(values.mean()), float(high - low) / 2, *p_values)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of two or more values, and the two ends of its 95 % confidence interval by Student's t."""
    mean, half = fmean(values), _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with this many degrees of freedom.

    With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom - 1).
    """
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95 * mass[-1], mass, angles)))


def _result(baseline: Any, bootstrap: Any, randomised: Any) -> MetricResult:  # noqa: ANN401
    """From sacreBLEU's results. p is 1 for equal scores; sacreBLEU reports 0 if all samples are equal too."""
    equal = bootstrap is not baseline and bootstrap.score == baseline.score
    p_values = (1.0, 1.0) if equal else (bootstrap.p_value, randomised.p_value)
    return MetricResult(float(bootstrap.score), float(bootstrap.ci), *p_values)


def _with_cached_statistics(metric: Any, references: Sequence[str]) -> Any:  # noqa: ANN401
    """The metric, which computes the statistics of an output against these references only once."""
    extract: Callable[..., Any] = metric._extract_corpus_statistics
    cached = functools.cache(lambda output: extract(list(output), [references]))
    metric._extract_corpus_statistics = lambda output, _: cached(tuple(output))
    return metric


def _with_cached_scores(metric: SentenceMetric) -> SentenceMetric:
    """The metric, which scores an output only once."""
    cached = functools.cache(lambda output: metric(list(output)))
    return lambda output: cached(tuple(output))
