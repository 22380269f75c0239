"""Minimum risk training: the model samples translations and learns to prefer those near the reference (Shen et al.
2016).

Shapes: B sentences, N candidates of all of them, C candidates of the sentence that has most, S source positions, T
target positions, M target tokens of all candidates, R readout.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.config.schema import training as schema
from nmt.data.batching import Batch, padded
from nmt.data.tokenizer import Tokenizer
from nmt.metrics.bleu import TokenBLEU
from nmt.model.decoder import Decoded
from nmt.model.state import DecoderState
from nmt.objectives.token_losses import Prediction, Terms, TokenLoss
from nmt.ops.sentence_draws import copied_draws, current_keys, sampling_draws
from nmt.search.hypothesis import NO_PENALTY, Limits, StepOutput, Symbols
from nmt.search.rollout import SamplingOptions, Uniform, sample


class Candidates(NamedTuple):
    """Different translations of the same sentences, grouped by sentence with the reference first."""

    tokens: list[list[int]]  # of each of the N, </s> last
    sentences: Tensor  # int64 (N,) on the CPU, from 0 to B - 1
    counted: Tensor  # bool (N,) on the CPU, False: a reference that is only here for its likelihood
    risks: Tensor  # float32 (N,) on the CPU, 1 - BLEU


class MinimumRisk:
    """sum_y Q(y) risk(y) over a sentence's candidates y, with Q(y) = p(y)^sharpness / sum (Shen et al. 2016, eq. 8 and
    9), and risk(y) = 1 - BLEU over tokens.

    Candidates are sampled without dropout and weighted with dropout. The encoder runs once for all candidates of a
    sentence, the decoder once for all candidates.
    """

    def __init__(self, likelihood: TokenLoss, config: schema.MinimumRisk, target: Tokenizer) -> None:
        self.likelihood, self.model, self.config, self.pad = likelihood, likelihood.model, config, target.pad
        self.symbols = Symbols(target.bos, target.eos, banned=(target.pad, target.bos, *target.tag_ids))

    def __call__(self, batch: Batch) -> tuple[Prediction, Tensor]:
        """The likelihood of the references, and the expected risk () summed over sentences."""
        candidates, device = self.candidates(batch), batch.source.device
        on_host = torch.from_numpy(padded(candidates.tokens, self.pad))
        real = (on_host != self.pad).flatten().nonzero()[:, 0].to(device, non_blocking=True)
        targets = on_host.to(device, non_blocking=True)
        inputs = torch.cat([targets.new_full((len(targets), 1), self.symbols.bos), targets[:, :-1]], dim=1)
        sentences = candidates.sentences.to(device, non_blocking=True)
        with copied_draws(candidates.sentences, numbers_within(candidates.sentences)):
            decoded: Decoded = self.model(batch.source, batch.lengths, inputs, sentences)
        risk = self._expected_risk(decoded, targets, real, candidates)
        references = candidates.sentences.diff(prepend=torch.tensor([-1])).nonzero()[:, 0]
        references = references.to(device, non_blocking=True)
        T = batch.target_out.shape[1]
        weights, log_weights = (
            None if part is None else part[references, :T] for part in (decoded.weights, decoded.log_weights)
        )
        copying = None if decoded.copying is None else decoded.copying.select(references).between(0, T)
        of_references = Decoded(decoded.readouts[references, :T], weights, log_weights, copying=copying)
        return self.likelihood.of_decoded(batch, of_references, batch.target_out), risk

    def candidates(self, batch: Batch) -> Candidates:
        """Samples from the model."""
        tokens: list[list[int]] = []
        sentences: list[int] = []
        counted: list[bool] = []
        risks: list[float] = []
        references = [row[row != self.pad].tolist() for row in batch.target_out.cpu()]
        for sentence, (reference, samples) in enumerate(zip(references, self._sample(batch, references), strict=True)):
            different = list(dict.fromkeys([tuple(reference), *map(tuple, samples)]))
            bleu = TokenBLEU(reference[:-1])
            tokens += map(list, different)
            sentences += [sentence] * len(different)
            counted += [self.config.reference or reference in samples, *[True] * (len(different) - 1)]
            risks += [1 - bleu(candidate[:-1]) for candidate in different]
        return Candidates(tokens, torch.tensor(sentences), torch.tensor(counted), torch.tensor(risks))

    @torch.no_grad()
    def _sample(self, batch: Batch, references: list[list[int]]) -> list[list[list[int]]]:
        longest = [math.ceil(self.config.max_ratio * len(reference)) for reference in references]
        self.model.eval()
        hypotheses = sample(
            self._step,
            self.model.encode(batch.source, batch.lengths),
            self.symbols,
            Limits(0, longest),
            options=SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, n_samples=self.config.samples),
            uniform=self._uniform(len(references), batch.source.device),
            penalty=NO_PENALTY,
            device=batch.source.device,
        )
        self.model.train()
        torch.clear_autocast_cache()  # before 2.10, torch would reuse these casts, which have no gradient, in training
        return [[hypothesis.tokens for hypothesis in group] for group in hypotheses]

    def _uniform(self, sentences: int, device: torch.device) -> Uniform:
        """The numbers that samples are drawn with, of the current sentences if there are any."""
        keys = current_keys()
        if keys is None:
            keys = torch.randint(2**62, (sentences,))
        return sampling_draws(keys, self.config.samples, device)

    def _step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        return self.model.step(tokens, state)._replace(weights=None)  # no one reads the samples' attention

    def _expected_risk(self, decoded: Decoded, targets: Tensor, real: Tensor, candidates: Candidates) -> Tensor:
        """What was decoded for int64 (N, T), int64 (M,) indices of the N * T tokens that are no padding -> (),
        differentiable.

        The risk depends on all log-probabilities at once, so logits are computed twice: first for the risk's gradient
        with respect to each log-probability, then for the loss whose gradient that is.
        """
        predictions, tokens = decoded.tokens(real), targets.flatten()[real][:, None]
        with torch.no_grad():
            terms = self.model.loss(predictions, tokens, self.pad, log_likelihood).terms
        log_probs = terms["log_likelihood"][:, 0]
        log_probs.requires_grad_()
        with torch.enable_grad():
            of_candidates = log_probs.new_zeros(len(targets)).index_add(0, real // targets.shape[1], log_probs)
            risk = expected_risk(of_candidates, candidates, self.config.sharpness)
        if not torch.is_grad_enabled():
            return risk.detach()
        (slopes,) = torch.autograd.grad(risk, log_probs)
        linear = self.model.loss(predictions, tokens, self.pad, log_likelihood, slopes).total
        return risk.detach() + (linear - linear.detach())


def log_likelihood(logits: Tensor, targets: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Terms]:
    """A criterion: (1, n, V), int64 (n,) -> log-probabilities of the targets (n,), times a factor (n,) each."""
    log_probs = logits[0].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return log_probs if factors is None else factors * log_probs, {"log_likelihood": log_probs}


def expected_risk(log_probs: Tensor, candidates: Candidates, sharpness: float) -> Tensor:
    """Log-probabilities of candidates (N,) on any device -> (), summed over sentences. What does not depend on the
    model is computed on the host."""
    sentences = candidates.sentences
    counts = torch.bincount(sentences)
    columns = numbers_within(sentences)
    shape = len(counts), int(counts.max())  # (B, C)
    sentences, columns, counted, risks = (
        part.to(log_probs.device, non_blocking=True)
        for part in (sentences, columns, candidates.counted, candidates.risks)
    )
    sharpened = (sharpness * log_probs).masked_fill(~counted, -torch.inf)
    probs = log_probs.new_full(shape, -torch.inf).index_put((sentences, columns), sharpened).softmax(-1)
    return (probs[sentences, columns] * risks.to(probs.dtype)).sum()


def numbers_within(sentences: Tensor) -> Tensor:
    """int64 (N,), sorted -> (N,), the number of each candidate among those of its sentence, from 0."""
    counts = torch.bincount(sentences)
    return torch.arange(len(sentences)) - (counts.cumsum(0) - counts)[sentences]
