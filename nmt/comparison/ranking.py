"""By which metric systems are ranked and tested."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from nmt.comparison.entry import HeldOut
from nmt.config.schema import Metric
from nmt.config.schema.training import LOWER_IS_BETTER
from nmt.evaluation import load_comet
from nmt.metrics.comet import Comet
from nmt.metrics.significance import SentenceMetric


class Ranking(NamedTuple):
    """A metric, with the model of COMET."""

    metric: Metric = "bleu"
    comet: Comet | None = None

    @classmethod
    def by(cls, metric: Metric, comet_model: str) -> Self:
        """Raises UserError if COMET is asked for and not available."""
        if metric != "comet":
            return cls(metric)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(metric, load_comet(comet_model, "comet_model", device))

    @property
    def sign(self) -> int:
        """1 if higher scores are better, else -1."""
        return -1 if self.metric in LOWER_IS_BETTER else 1

    def sentence_metrics(self, held_out: HeldOut) -> dict[str, SentenceMetric]:
        """Metrics of single sentences, for Significance."""
        if (comet := self.comet) is None:
            return {}

        def score(output: Sequence[str]) -> list[float]:
            return comet(held_out.sources, output, held_out.references)

        return {"comet": score}
