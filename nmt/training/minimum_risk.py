"""Minimum risk training: translations that the model draws itself are to be near the reference (Shen et al. 2016).

Shapes: B sentences, N candidates of all of them, C of one at most, S source positions, T target positions, R readout.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.config import schema
from nmt.data.batching import Batch, padded
from nmt.data.tokenizer import Tokenizer
from nmt.metrics.bleu import TokenBLEU
from nmt.model.decoder import Decoded
from nmt.model.seq2seq import Seq2Seq
from nmt.model.state import DecoderState
from nmt.ops.log_probs import linear_log_probs
from nmt.search.hypothesis import LengthPenalty, Limits, StepOutput, Symbols
from nmt.search.rollout import SamplingOptions, sample

NO_PENALTY = LengthPenalty("none", 0.0)


class Candidates(NamedTuple):
    """Different translations of the same sentences, those of one side by side and its reference first."""

    tokens: list[list[int]]  # of each of the N, </s> last
    sentences: Tensor  # int64 (N,) on the CPU, from 0 to B - 1
    counted: Tensor  # bool (N,) on the CPU, False: a reference that is there for its likelihood alone
    risks: Tensor  # float32 (N,) on the CPU, 1 - BLEU


class MinimumRisk:
    """sum_y Q(y) risk(y) over a sentence's candidates y, with Q(y) = p(y)^sharpness / sum (Shen et al. 2016, eq. 8 and
    9), and risk(y) = 1 - BLEU over tokens.

    Candidates are drawn with dropout off and weighted with dropout on. The encoder runs once for all candidates of a
    sentence, the decoder once for all candidates.
    """

    def __init__(self, model: Seq2Seq, config: schema.MinimumRisk, target: Tokenizer) -> None:
        self.model, self.config, self.pad = model, config, target.pad
        self.symbols = Symbols(target.bos, target.eos, banned=(target.pad, target.bos))

    def __call__(self, batch: Batch) -> tuple[Decoded, Tensor]:
        """What the model makes of the references, (B, T, ...), and the expected risk () summed over sentences."""
        candidates, device = self.candidates(batch), batch.source.device
        on_host = torch.from_numpy(padded(candidates.tokens, self.pad))
        real = (on_host != self.pad).flatten().nonzero()[:, 0].to(device, non_blocking=True)
        targets = on_host.to(device, non_blocking=True)
        inputs = torch.cat([targets.new_full((len(targets), 1), self.symbols.bos), targets[:, :-1]], dim=1)
        sentences = candidates.sentences.to(device, non_blocking=True)
        decoded: Decoded = self.model(batch.source, batch.lengths, inputs, sentences)
        log_probs = self._log_probs(decoded.readouts, targets, real)
        risk = expected_risk(log_probs, candidates, self.config.sharpness)
        references = candidates.sentences.diff(prepend=torch.tensor([-1])).nonzero()[:, 0]
        references = references.to(device, non_blocking=True)
        T = batch.target_out.shape[1]
        weights, log_weights = (
            None if part is None else part[references, :T] for part in (decoded.weights, decoded.log_weights)
        )
        return Decoded(decoded.readouts[references, :T], weights, log_weights), risk

    def candidates(self, batch: Batch) -> Candidates:
        """Drawn from the model; torch's global generator decides."""
        tokens: list[list[int]] = []
        sentences: list[int] = []
        counted: list[bool] = []
        risks: list[float] = []
        references = [row[row != self.pad].tolist() for row in batch.target_out.cpu()]
        for sentence, (reference, drawn) in enumerate(zip(references, self._draw(batch, references), strict=True)):
            different = list(dict.fromkeys([tuple(reference), *map(tuple, drawn)]))
            bleu = TokenBLEU(reference[:-1])
            tokens += map(list, different)
            sentences += [sentence] * len(different)
            counted += [self.config.reference or reference in drawn, *[True] * (len(different) - 1)]
            risks += [1 - bleu(candidate[:-1]) for candidate in different]
        return Candidates(tokens, torch.tensor(sentences), torch.tensor(counted), torch.tensor(risks))

    @torch.no_grad()
    def _draw(self, batch: Batch, references: list[list[int]]) -> list[list[list[int]]]:
        longest = [math.ceil(self.config.max_ratio * len(reference)) for reference in references]
        self.model.eval()
        found = sample(
            self._step,
            self.model.encode(batch.source, batch.lengths),
            self.symbols,
            Limits(0, longest),
            options=SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, n_samples=self.config.samples),
            generator=None,
            penalty=NO_PENALTY,
            device=batch.source.device,
        )
        self.model.train()
        torch.clear_autocast_cache()  # torch before 2.10 would give the trained pass these copies, without a gradient
        return [[hypothesis.tokens for hypothesis in group] for group in found]

    def _step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        return self.model.step(tokens, state)._replace(weights=None)  # which nobody reads

    def _log_probs(self, readouts: Tensor, targets: Tensor, real: Tensor) -> Tensor:
        """(N, T, R), int64 (N, T), int64 indices of the N * T tokens that are not padding -> (N,), of whole
        candidates."""
        operands = self.model.output.operands(readouts.flatten(0, 1).index_select(0, real))
        of_tokens = linear_log_probs(*operands, targets.flatten()[real])
        return of_tokens.new_zeros(len(targets)).index_add(0, real // targets.shape[1], of_tokens)


def expected_risk(log_probs: Tensor, candidates: Candidates, sharpness: float) -> Tensor:
    """(N,) on any device -> (), summed over sentences. What does not depend on the model is computed on the host."""
    sentences = candidates.sentences
    counts = torch.bincount(sentences)
    columns = torch.arange(len(sentences)) - (counts.cumsum(0) - counts)[sentences]
    shape = len(counts), int(counts.max())  # (B, C)
    sentences, columns, counted, risks = (
        each.to(log_probs.device, non_blocking=True)
        for each in (sentences, columns, candidates.counted, candidates.risks)
    )
    sharpened = (sharpness * log_probs).masked_fill(~counted, -torch.inf)
    probs = log_probs.new_full(shape, -torch.inf).index_put((sentences, columns), sharpened).softmax(-1)
    return (probs[sentences, columns] * risks.to(probs.dtype)).sum()
