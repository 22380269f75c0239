"""By which metric systems are ranked and tested."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from nmt.compare.entry import HeldOut
from nmt.config.schema import Metric
from nmt.config.schema.training import LOWER_IS_BETTER
from nmt.evaluate.comet import Comet
from nmt.evaluate.evaluation import load_comet
from nmt.evaluate.significance import Output


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

    def sentence_scores(self, hypotheses: Sequence[str], held_out: HeldOut) -> Output:
        """Statistics (N, 2) of metrics that are means of sentence scores: the score of each sentence, and 1."""
        if self.comet is None:
            return {}
        scores = self.comet(held_out.sources, hypotheses, held_out.references)
        return {"comet": np.column_stack([scores, np.ones(len(scores))])}
