"""Significance of score differences: sacreBLEU's confidence intervals and paired tests.

Paired bootstrap resampling (Koehn 2004) and paired approximate randomisation (Riezler and Maxwell 2005), with the
results of `sacrebleu --paired-bs` and `--paired-ar`. And Student's interval of a mean over seeds.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from nmt.metrics.bleu import METRICS, ScoreSettings, bleu_metric, nfc


class MetricResult(NamedTuple):
    """A system's score by one metric, tested against the baseline."""

    score: float
    interval: float  # half the width of the 95 % confidence interval
    p_bootstrap: float | None  # None for the baseline itself
    p_randomisation: float | None


class Significance:
    """Scores systems on one set of references and tests their differences. Caches the statistics of each output."""

    def __init__(self, references: Sequence[str], settings: ScoreSettings, samples: int, trials: int) -> None:
        """Number of bootstrap samples and randomisation trials. $SACREBLEU_SEED sets the seed."""
        self.references, self.samples, self.trials = nfc(references), samples, trials
        metrics = (bleu_metric(settings), CHRF(), TER())
        self.metrics = {name: _with_cache(metric) for name, metric in zip(METRICS, metrics, strict=True)}

    def __call__(self, baseline: Sequence[str], systems: Sequence[Sequence[str]]) -> list[dict[str, MetricResult]]:
        """Results of the baseline, then of each system, by metric: bleu, chrf, ter."""
        outputs: list[tuple[str, Sequence[str]]]
        outputs = [(str(number), nfc(output)) for number, output in enumerate([baseline, *systems])]
        bootstrap, randomisation = (
            list(PairedTest(outputs, self.metrics, [self.references], kind, count)()[1].values())[1:]
            for kind, count in (("bs", self.samples), ("ar", self.trials))
        )
        return [
            {
                metric: _result(boot[0], boot[row], randomised[row])
                for metric, boot, randomised in zip(METRICS, bootstrap, randomisation, strict=True)
            }
            for row in range(len(outputs))
        ]

    def bleu(self, output: Sequence[str]) -> float:
        """BLEU without tests."""
        metric = self.metrics["bleu"]
        statistics = metric._extract_corpus_statistics(nfc(output), [self.references])
        return float(metric._aggregate_and_compute(statistics).score)


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


def _with_cache(metric: Any) -> Any:  # noqa: ANN401
    extract: Callable[..., Any] = metric._extract_corpus_statistics
    cache: dict[tuple[str, ...], Any] = {}

    def cached(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
        key = tuple(hypotheses)
        if key not in cache:
            cache[key] = extract(hypotheses, references)
        return cache[key]

    metric._extract_corpus_statistics = cached
    return metric
