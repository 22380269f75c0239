"""Validation: loss, scores and samples of the validation split.

Shapes: as in nmt.model.seq2seq.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from itertools import chain
from statistics import fmean
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.config.schema import training as schema
from nmt.data.batching import Batches, Indices
from nmt.data.prepared import Direction, Split
from nmt.evaluate.bleu import METRICS, ScoreSettings, perplexity
from nmt.evaluate.comet import Comet
from nmt.evaluate.evaluation import align, evaluate, load_comet, score_settings
from nmt.explain.attention_statistics import Positions, attention_statistics, chosen_positions
from nmt.explain.explanation import Saliency, saliency
from nmt.model.seq2seq import evaluation_mode
from nmt.system.machine import retry_in_halves
from nmt.translate.translator import Progress, Translation, Translator


class Scoring(NamedTuple):
    """What scores translations."""

    settings: ScoreSettings
    comet: Comet | None = None  # on the main process, if COMET is monitored

    @classmethod
    def choose(cls, config: TrainConfig, device: torch.device, is_main: bool) -> Self:
        """Raises UserError if what the configuration asks for is not available."""
        settings, validation = score_settings(config.evaluation, config.data.target_lang), config.validation
        if validation.monitor != "comet" or not is_main:
            return cls(settings)
        return cls(settings, load_comet(validation.comet_model, "validation.comet_model", device))


class Sample(NamedTuple):
    """A sentence that a validation shows."""

    source: str
    reference: str
    translation: Translation
    saliency: Saliency | None


class Validation(NamedTuple):
    """Scores and samples."""

    # loss in nats per token, perplexity, bleu, the monitored metric, with attention its entropy, the share of </s> and
    # the AER; of several directions also each one's metrics, such as bleu_en-de
    scores: dict[str, float]
    samples: list[Sample]
    positions: Positions | None  # of a hard attention


class Validator:
    """Translates and scores the validation split."""

    def __init__(
        self,
        split: Split,
        batches: Batches,
        translator: Translator,
        scoring: Scoring,
        config: schema.Validation,
        progress: Progress,
    ) -> None:
        """progress: called after each batch; its exceptions end the validation.

        Raises UserError if AER is monitored and the split has no gold alignments.
        """
        if config.monitor == "aer" and split.alignments is None:
            raise UserError(
                "validation.monitor=aer: the validation set has no gold word alignments; add its file of "
                "data.alignments, or monitor bleu or loss"
            )
        self.metrics = {"bleu", config.monitor} & set(METRICS)
        self.progress = progress
        self.translator, self.scoring, self.config = translator, scoring, config
        self.sources, self.references, self.gold = split.source.lines(), split.target.lines(), split.alignments
        self.batches, self.plan, self.directions = batches, batches.epoch(0), split.directions

    def only(self, indices: Indices) -> Self:
        """The validation of these pairs alone."""
        other = copy(self)
        other.plan = [indices]
        other.sources, other.references = ([side[i] for i in indices] for side in (self.sources, self.references))
        other.gold = None if self.gold is None else [self.gold[int(i)] for i in indices]
        other.directions = [self.directions[i] for i in indices] if self.directions else []
        return other

    def __call__(self) -> Validation:
        """Validate the model's current weights."""
        nll, tokens = self._loss()
        evaluation = evaluate(
            self.translator,
            self.sources,
            self.references,
            self.scoring.settings,
            self.metrics,
            self.progress,
            self.directions,
        )
        scores = {"loss": nll / tokens, "perplexity": perplexity(nll, tokens)}
        scores |= {metric: getattr(evaluation.scores, metric) for metric in METRICS if metric in self.metrics}
        for direction, found in evaluation.by_direction.items():
            scores |= {f"{metric}_{direction}": getattr(found, metric) for metric in METRICS if metric in self.metrics}
        if self.config.monitor == "comet":
            scores["comet"] = self.translator.group.on_main(partial(self._comet, evaluation.hypotheses))
        alignments = [result.alignment for result in evaluation.translations if result.alignment is not None]
        if alignments:
            statistics = attention_statistics(alignments)
            scores |= {"attention_entropy": statistics.entropy, "attention_on_end": statistics.on_end}
            if self.gold is not None:
                aligned = align(self.translator, self.sources, self.references, self.gold, self.progress)
                scores |= {} if aligned is None else {"aer": aligned.scores["aer"]}
        samples = []
        if self.translator.group.is_main:
            samples = pick_samples(self.translator, self.sources, self.references, evaluation.translations, self.config)
        return Validation(scores, samples, chosen_positions(alignments) if alignments else None)

    def _comet(self, hypotheses: Sequence[str]) -> float:
        assert self.scoring.comet is not None
        texts = [*map(self.translator.tokenizers.source.tags.without, self.sources)]
        scores = self.scoring.comet(texts, hypotheses, self.references, self.progress)
        if not self.directions:
            return fmean(scores)
        by_direction: dict[Direction, list[float]] = {}
        for direction, score in zip(self.directions, scores, strict=True):
            by_direction.setdefault(direction, []).append(score)
        return fmean(map(fmean, by_direction.values()))

    @torch.no_grad()
    def _loss(self) -> tuple[float, int]:
        """Negative log-likelihood of the references, in nats, and their tokens."""
        model, machine, pad = self.translator.single, self.translator.machine, self.translator.tokenizers.target.pad

        def measure(indices: Indices) -> tuple[Tensor, int]:
            (batch,) = self.batches.load(indices, 0)
            batch = batch.to(machine.device)
            with machine.autocast():
                decoded = model(batch.source, batch.lengths, batch.target_in)
                log_probs = model.log_probs(decoded.prediction, batch.target_out, pad)
                return -log_probs.sum().cpu(), batch.target_tokens

        def measured(plan: Sequence[Indices]) -> Iterator[list[tuple[Tensor, int]]]:
            for indices in plan:
                yield retry_in_halves(measure, indices)
                self.progress(len(indices))

        group = self.translator.group
        with evaluation_mode(model):
            parts = list(chain.from_iterable(group.merge(measured(group.share(self.plan)))))
        nll = torch.stack([part_nll.double() for part_nll, _ in parts]).sum()
        return float(nll), sum(part_tokens for _, part_tokens in parts)


def pick_samples(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[Translation],
    config: schema.Validation,
) -> list[Sample]:
    """`config.samples` sentences, spread evenly over all."""
    indices = sorted({int(i) for i in np.linspace(0, len(sources) - 1, min(config.samples, len(sources)))})
    saliencies: list[Saliency | None] = [None] * len(indices)
    if config.saliency:
        saliencies = [*saliency(translator, [sources[i] for i in indices], [translations[i].text for i in indices])]
    texts = [translator.tokenizers.source.tags.without(sources[i]) for i in indices]
    shown = zip(indices, texts, saliencies, strict=True)
    return [Sample(text, references[i], translations[i], each) for i, text, each in shown]
