"""The translation model: embeddings, encoder, bridge, decoder, output layer. And ensembles of several models.

Shapes: B batch, S source positions, T target positions, E embedding, R readout, V vocabulary, K models.
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from nmt.attention.alignment import Policy
from nmt.attention.attention import Detail, Steering
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.model.decoder import Decoded, Decoder, DecoderState, Infer, Inferred, StepOutput
from nmt.model.latent import InferenceNetwork
from nmt.model.prediction import Output, Prediction
from nmt.model.recurrent import Bridge, Encoder
from nmt.ops.layers import Dropout, dropout
from nmt.ops.output_loss import Criterion, OutputLoss, cross_entropy


class EmbeddingDropout(Dropout):
    """Drops whole embedded tokens with probability `words` (Sennrich et al. 2016, the Edinburgh systems), then elements
    with probability p. The rest is divided by the probability of being kept, as in Nematus."""

    def __init__(self, p: float, words: float = 0.0) -> None:
        super().__init__(p)
        self.words = words

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        if self.training and self.words:
            inputs = inputs * dropout(torch.ones_like(inputs[..., 0]), self.words, training=True)[..., None]
        return super().forward(inputs)


class Forced(NamedTuple):
    """Result of forced decoding."""

    log_probs: Tensor  # (B, T) of their tokens, 0 on padding
    weights: Tensor | None  # (B, T, S), row t used to produce token t; with latent positions their posterior
    detail: Detail | None = None


class Seq2Seq(nn.Module):
    """p(y | x), token by token. The token id `pad` marks padding."""

    def __init__(
        self,
        source_embedding: nn.Embedding,
        target_embedding: nn.Embedding,
        encoder: Encoder,
        bridge: Bridge,
        decoder: Decoder,
        output: Output,
        policy: Policy | None = None,
        inference: InferenceNetwork | None = None,
        *,
        embedding_dropout: EmbeddingDropout,
    ) -> None:
        super().__init__()
        self.source_embedding, self.target_embedding = source_embedding, target_embedding
        self.encoder, self.bridge, self.decoder, self.output = encoder, bridge, decoder, output
        self.policy = policy  # trains sampled positions
        self.inference = inference  # trains a variational attention
        self.dropout = embedding_dropout

    @property
    def models(self) -> "tuple[Seq2Seq, ...]":
        """The models that predict together: this one; see Ensemble."""
        return (self,)

    @property
    def attends(self) -> bool:
        """Check if the model has an attention."""
        return self.decoder.attention is not None

    @property
    def has_copy_gate(self) -> bool:
        """Check if the model copies source tokens, whose ids must then be those of target tokens."""
        return self.decoder.copy is not None

    def record_log_weights(self) -> None:
        """Make the attention return log-weights, for guided alignment."""
        if self.decoder.attention is not None:
            for module in self.decoder.attention.modules():
                if isinstance(module, SoftmaxNormalizer):
                    module.with_log_weights = True

    def encode(self, source: Tensor, lengths: Tensor) -> DecoderState:
        """int64 (B, S), int64 (B,) -> the decoder's initial state. The lengths are on the CPU, or for a CUDA graph
        on the GPU."""
        return self.encode_embedded(self.source_embedding(source), lengths, source)

    def encode_embedded(self, embedded: Tensor, lengths: Tensor, source: Tensor) -> DecoderState:
        """(B, S, E), int64 (B,), int64 (B, S) -> the decoder's initial state. source: the tokens that may be copied,
        NEVER for one that may not."""
        words = self.dropout(embedded)
        encoded = self.encoder(words, lengths)
        return self.decoder.start(self.bridge(encoded.summary), encoded, self.decoder.prepare(), source, words)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor, target_out: Tensor | None = None) -> Decoded:
        """int64 (B, S), (B,), (B, T) = <s> y_1 ... y_{T-1} -> readouts (B, T, R), weights (B, T, S) or None.

        With `target_out`, int64 (B, T) = y_1 ... y_T, an inference network gives the weights of a latent position.
        """
        return self.decode(target, self.encode(source, lengths), target_out)

    def decode(self, target: Tensor, state: DecoderState, target_out: Tensor | None = None) -> Decoded:
        """int64 (B, T) = <s> y_1 ... y_{T-1}, the state before the first step; see `forward`."""
        embedded = self._embed_target(target)
        infer: Infer | None = None
        if self.inference is not None and target_out is not None:
            infer = partial(self._infer, target_out, state)
        return self.decoder.teacher_force(embedded, state, target, self.output, infer)

    def _infer(self, target_out: Tensor, state: DecoderState, prior: Tensor) -> Inferred:
        """int64 (B, T) = y_1 ... y_T, the state, the prior (B, T, S) -> what the inference network says."""
        assert self.inference is not None
        lengths = target_out.ne(int(self.target_embedding.padding_idx or 0)).sum(1)
        embedded = self._embed_target(target_out)
        inferred: Inferred = self.inference(embedded, lengths, state.attended_source().memory.values, prior)
        return inferred

    def loss(
        self, prediction: Prediction, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
    ) -> OutputLoss:
        """See Prediction.loss."""
        return prediction.loss(self.output.layer(), targets, pad, criterion, *by_position)

    @torch.no_grad()
    def log_probs(self, prediction: Prediction, targets: Tensor, pad: int) -> Tensor:
        """int64 (B, T) = y_1 ... y_T -> log p(y_t | y_1 ... y_{t-1}, x) (B, T), 0 on padding."""
        return -self.loss(prediction, targets, pad, _negative_log_likelihood).terms["nll"]

    def force(
        self,
        source: Tensor,
        lengths: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        pad: int,
        steering: Steering | None = None,
        detailed: bool = False,
    ) -> Forced:
        """Forced decoding: int64 (B, S), (B,), (B, T) = <s> y_1 ... y_{T-1}, (B, T) = y_1 ... y_T ->
        log-probabilities, attention weights and, if `detailed`, their detail. The targets are padded with `pad`."""
        state = self.encode(source, lengths)
        state = state if steering is None else state.steered(steering)
        decoded = self.decode(target_in, state.detailed() if detailed else state)
        embedded, counted = self._embed_target(target_in), target_out != pad
        weights = self.decoder.posterior(decoded, embedded, state, target_out, counted, self.output)
        detail = None if decoded.attention is None else decoded.attention.detail
        return Forced(self.log_probs(decoded.prediction, target_out, pad), weights, detail)

    def step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        """int64 (B,) previous tokens -> logits of the next token, attention weights, next state. The plain way: a
        search prepares the model first, see nmt.translate.prepared_model."""
        layer = self.output.layer()
        prediction, weights, state = self.decoder.step(
            self._embed_target(tokens), self.decoder.observe(state, tokens, layer)
        )
        return StepOutput(prediction.logits(layer).flatten(0, -2), weights, state)

    def _embed_target(self, tokens: Tensor) -> Tensor:
        """int64 (...) -> (..., E), after dropout."""
        embedded: Tensor = self.dropout(self.target_embedding(tokens))
        return embedded


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(1, n, V), int64 (n,) -> (n,)."""
    _, nll = cross_entropy(logits[0], targets)
    return nll, {"nll": nll}


class EnsembleState(NamedTuple):
    """The state of each model's decoder."""

    members: tuple[DecoderState, ...]

    def steered(self, steering: Steering) -> Self:
        """See DecoderState.steered."""
        return self._replace(members=tuple(member.steered(steering) for member in self.members))

    def select(self, index: Tensor) -> Self:
        """Take the rows `index` of the batch, which may repeat."""
        return self._replace(members=tuple(member.select(index) for member in self.members))

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses; see nmt.model.decoder.State."""
        return self._replace(members=tuple(member.branch(index, sentences) for member in self.members))


class SearchEnsemble:
    """p(y_t | y_<t, x) = 1/K sum_k p_k(y_t | y_<t, x)   (ensembles: Sutskever et al. 2014, 3.6).

    The models may differ in everything but their vocabularies. Attention weights are averaged over the models that have
    an attention.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        """members: models that encode and step as a Seq2Seq does, or as one prepared for search."""
        self.members = tuple(members)

    def encode(self, source: Tensor, lengths: Tensor, *vocabulary: Tensor) -> EnsembleState:
        """int64 (B, S), int64 (B,) on the CPU -> the decoders' states before their first step. vocabulary: see
        SearchModel.encode."""
        return EnsembleState(tuple(member.encode(source, lengths, *vocabulary) for member in self.members))

    def step(self, tokens: Tensor, state: EnsembleState) -> StepOutput[EnsembleState]:
        """Previous tokens, int64 (B,) -> logarithm of the members' mean probabilities of the next token, float32
        (B, V), their mean attention (B, S), and the next state."""
        steps = [member.step(tokens, its_state) for member, its_state in zip(self.members, state.members, strict=True)]
        log_probs = log_mean([step.logits.log_softmax(-1, dtype=torch.float32) for step in steps])
        return StepOutput(log_probs, _mean([s.weights for s in steps]), EnsembleState(tuple(s.state for s in steps)))


class Ensemble(nn.Module, SearchEnsemble):
    """A SearchEnsemble of whole models, which can also score translations."""

    def __init__(self, members: Sequence[Seq2Seq]) -> None:
        nn.Module.__init__(self)
        SearchEnsemble.__init__(self, members)
        self.models = tuple(members)
        self._registered = nn.ModuleList(members)

    @property
    def attends(self) -> bool:
        """Check if any model has an attention."""
        return any(member.attends for member in self.members)

    @property
    def has_copy_gate(self) -> bool:
        """Check if any model copies source tokens."""
        return any(model.has_copy_gate for model in self.models)

    def force(
        self,
        source: Tensor,
        lengths: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        pad: int,
        steering: Steering | None = None,
        detailed: bool = False,
    ) -> Forced:
        """As Seq2Seq.force: the logarithm of each token's mean probability, the mean attention, no detail."""
        forced = [member.force(source, lengths, target_in, target_out, pad, steering) for member in self.models]
        return Forced(log_mean([member.log_probs for member in forced]), _mean([member.weights for member in forced]))


def log_mean(log_probs: Sequence[Tensor]) -> Tensor:
    """K x (...) log-probabilities -> log(1/K sum_k exp(...)), exact if all are equal."""
    highest = reduce(torch.maximum, log_probs)
    total = torch.zeros_like(highest)
    for member in log_probs:
        total += (member - highest).exp_()
    return total.div_(len(log_probs)).log_().add_(highest)


def _mean(weights: Sequence[Tensor | None]) -> Tensor | None:
    present = [weight.float() for weight in weights if weight is not None]
    return torch.stack(present).mean(0) if present else None
