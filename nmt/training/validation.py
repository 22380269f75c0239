"""Validation: computes loss and scores of the validation split, and picks sample translations."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.data.batching import Batches, Indices
from nmt.evaluate.evaluation import align, evaluate
from nmt.evaluate.metrics import METRICS, ScoreSettings, perplexity
from nmt.explain.explanation import Explanation, attention_statistics, explain
from nmt.system.machine import retry_in_halves
from nmt.translate.translation import Translation
from nmt.translate.translator import Progress, Translator, evaluation_mode


class Sample(NamedTuple):
    """A sentence pair whose translation is shown after a validation."""

    source: str
    reference: str
    translation: Translation
    explanation: Explanation | None  # holds the saliency; None unless validation.saliency is set


class Validator:
    """Translates and scores the validation split, or some of its pairs."""

    def __init__(
        self,
        batches: Batches,
        translator: Translator,
        settings: ScoreSettings,
        config: schema.Validation,
        progress: Progress,
    ) -> None:
        """batches: batches of the validation split; progress: called after each batch with its number of sentences, and
        may raise an error to end the validation.

        Raises UserError if AER is monitored and the split has no gold alignments.
        """
        if config.monitor == "aer" and batches.split.alignments is None:
            raise UserError(
                "validation.monitor=aer: the validation set has no gold word alignments; add its file of "
                "data.alignments, or monitor bleu or loss"
            )
        self.batches, self.plan, self.translator = batches, batches.epoch(0), translator
        self.settings, self.config, self.progress = settings, config, progress
        self.metrics = [name for name in METRICS if name in (*settings.metrics, config.monitor)]
        self.sources, self.references = batches.split.source.lines(), batches.split.target.lines()

    def __call__(self, pairs: Indices | None = None) -> tuple[dict[str, float], list[Sample]]:
        """Validate the model's current parameters on these pairs, by default on the whole split -> scores, samples.

        The scores are the negative log-likelihood in nats per token ("loss"), perplexity, the metrics of evaluation and
        the monitored one. For a model with attention also the entropy of the weights, the weight on </s>, and AER if
        there are gold alignments. Only rank 0 has samples.
        """
        try:
            split, plan = self.batches.split, self.plan if pairs is None else [pairs]
            chosen = range(len(split)) if pairs is None else pairs.tolist()
            sources, references = [self.sources[i] for i in chosen], [self.references[i] for i in chosen]
            nll, tokens = self._loss(plan)
            evaluation = evaluate(self.translator, sources, references, self.settings, self.metrics, self.progress)
            scores = {"loss": nll / tokens, "perplexity": perplexity(nll, tokens), **evaluation.scores}
            alignments = [result.alignment for result in evaluation.translations if result.alignment is not None]
            if alignments:
                statistics = attention_statistics(alignments)
                scores |= {"attention_entropy": statistics.entropy, "attention_on_end": statistics.on_end}
                if split.alignments is not None:
                    gold = [split.alignments[i] for i in chosen]
                    aligned = align(self.translator, sources, references, gold, self.progress)
                    scores |= {} if aligned is None else {"aer": aligned.scores["aer"]}
            samples = []
            if self.translator.group.is_main:
                samples = pick_samples(self.translator, sources, references, evaluation.translations, self.config)
            return scores, samples
        finally:
            self.translator.discard_search_models()  # frees the weights that were packed for search

    @torch.no_grad()
    def _loss(self, plan: Sequence[Indices]) -> tuple[float, int]:
        """Compute the total negative log-likelihood of the references in these batches, in nats, and count their
        tokens."""
        model, machine, pad = self.translator.single, self.translator.machine, self.translator.tokenizers.target.pad

        def measure(indices: Indices) -> tuple[Tensor, int]:
            """Compute the negative log-likelihood () of a batch of pairs, and count its target tokens."""
            (batch,) = self.batches.load(indices, 0)
            batch = batch.to(machine.device)
            with machine.autocast():
                decoded = model(batch.source, batch.lengths, batch.target_in)
                log_probs = model.log_probs(decoded.prediction, batch.target_out, pad)
                return -log_probs.sum().cpu(), batch.target_tokens

        def measured(share: Sequence[Indices]) -> Iterator[list[tuple[Tensor, int]]]:
            for indices in share:
                yield retry_in_halves(measure, indices)
                self.progress(len(indices))

        group = self.translator.group
        with evaluation_mode(model):
            parts = list(chain.from_iterable(group.merge(measured(group.share(plan)))))
        nll = torch.stack([part_nll.double() for part_nll, _ in parts]).sum()
        return float(nll), sum(part_tokens for _, part_tokens in parts)


def pick_samples(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[Translation],
    config: schema.Validation,
) -> list[Sample]:
    """Pick `config.samples` sentences, spread evenly over the split."""
    indices = sorted({int(i) for i in np.linspace(0, len(sources) - 1, min(config.samples, len(sources)))})
    samples = []
    for i in indices:
        explanation = explain(translator, sources[i], translations[i].tokens) if config.saliency else None
        samples.append(Sample(sources[i], references[i], translations[i], explanation))
    return samples
