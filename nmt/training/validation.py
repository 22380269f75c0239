"""What a validation measures.

Shapes: as in nmt.model.seq2seq.
"""

from typing import NamedTuple

import numpy as np
import torch

from nmt.data.batching import Batches
from nmt.data.prepared import Split
from nmt.evaluation import evaluate
from nmt.metrics.bleu import ScoreSettings
from nmt.training.journal import perplexity
from nmt.translator import Translation, Translator


class Validation(NamedTuple):
    """Scores, and what is shown of the translations."""

    scores: dict[str, float]  # loss (nats a token), perplexity, bleu
    samples: list[tuple[str, str, Translation]]  # source, reference, translation


class Validator:
    """Translates and scores the validation split, always in the same way."""

    def __init__(
        self, split: Split, batches: Batches, translator: Translator, scoring: ScoreSettings, samples: int
    ) -> None:
        self.translator, self.scoring = translator, scoring
        self.sources, self.references = split.source.lines(), split.target.lines()
        self.shown = sample_indices(len(split), samples)
        self.batches = batches

    def __call__(self) -> Validation:
        """Measure the model as it is now. Leaves it in training mode."""
        nll, tokens = self._loss()
        found = evaluate(self.translator, self.sources, self.references, self.scoring, ("bleu",))
        scores = {"loss": nll / tokens, "perplexity": perplexity(nll, tokens), "bleu": found.scores.bleu}
        samples = [(self.sources[i], self.references[i], found.translations[i]) for i in self.shown]
        return Validation(scores, samples)

    @torch.no_grad()
    def _loss(self) -> tuple[float, int]:
        """Negative log-likelihood of the references, in nats, and their tokens."""
        model, machine, pad = self.translator.model, self.translator.machine, self.translator.tokenizers.target.pad
        model.eval()
        nll, tokens = torch.zeros((), dtype=torch.float64), 0
        for indices in self.batches.epoch(0):
            (batch,) = self.batches.load(indices, 0)
            batch = batch.to(machine.device)
            with machine.autocast():
                decoded = model(batch.source, batch.lengths, batch.target_in)
                nll += model.loss(decoded.readouts, batch.target_out, pad).nll.cpu()
            tokens += batch.target_tokens
        model.train()
        return float(nll), tokens


def sample_indices(size: int, count: int) -> list[int]:
    """`count` indices spread evenly over `size` sentences."""
    return sorted({int(i) for i in np.linspace(0, size - 1, min(count, size))})
