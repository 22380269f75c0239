"""Is a difference real? sacreBLEU's confidence intervals and paired tests.

Paired bootstrap resampling (Koehn 2004) and paired approximate randomisation (Riezler and Maxwell 2005), with the
numbers that `sacrebleu --paired-bs` and `--paired-ar` give.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from nmt.metrics.bleu import METRICS, ScoreSettings, bleu_metric, nfc


class Tested(NamedTuple):
    """A system's score by one metric."""

    score: float
    interval: float  # half the width of the 95 % confidence interval
    p_bootstrap: float | None  # of the difference from the baseline; None for the baseline itself
    p_randomisation: float | None


class Significance:
    """Scores and tests systems on one set of references; what a metric counts in an output is counted once."""

    def __init__(self, references: Sequence[str], settings: ScoreSettings, samples: int, trials: int) -> None:
        """`samples`: of the bootstrap, `trials`: of the randomisation. Its seed is sacreBLEU's, $SACREBLEU_SEED."""
        self.references, self.samples, self.trials = nfc(references), samples, trials
        metrics = (bleu_metric(settings), CHRF(), TER())
        self.metrics = {name: _counting_once(metric) for name, metric in zip(METRICS, metrics, strict=True)}

    def __call__(self, baseline: Sequence[str], systems: Sequence[Sequence[str]]) -> list[dict[str, Tested]]:
        """The baseline's scores, then those of each system with its tests against it, by metric: bleu, chrf, ter.

        Of equal scores p is 1: sacreBLEU takes no difference for a certain one where the samples do not differ either.
        """
        named: list[tuple[str, Sequence[str]]]
        named = [(str(number), nfc(output)) for number, output in enumerate([baseline, *systems])]
        found = [
            list(PairedTest(named, self.metrics, [self.references], kind, count)()[1].values())[1:]
            for kind, count in (("bs", self.samples), ("ar", self.trials))
        ]
        return [
            {
                metric: _tested(boot[0], boot[row], randomised[row])
                for metric, boot, randomised in zip(METRICS, *found, strict=True)
            }
            for row in range(len(named))
        ]

    def bleu(self, output: Sequence[str]) -> float:
        """BLEU without tests."""
        metric = self.metrics["bleu"]
        statistics = metric._extract_corpus_statistics(nfc(output), [self.references])
        return float(metric._aggregate_and_compute(statistics).score)


def _tested(base: Any, boot: Any, randomised: Any) -> Tested:  # noqa: ANN401
    """From sacreBLEU's results of the baseline, of the bootstrap and of the randomisation."""
    same = boot is not base and boot.score == base.score
    p_values = (1.0, 1.0) if same else (boot.p_value, randomised.p_value)
    return Tested(float(boot.score), float(boot.ci), *p_values)


def _counting_once(metric: Any) -> Any:  # noqa: ANN401
    count: Callable[..., Any] = metric._extract_corpus_statistics
    known: dict[tuple[str, ...], Any] = {}

    def counted(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
        key = tuple(hypotheses)
        if key not in known:
            known[key] = count(hypotheses, references)
        return known[key]

    metric._extract_corpus_statistics = counted
    return metric
