"""The translation model: embeddings, encoder, bridge, decoder, output layer.

Shapes: B batch, S source positions, T target positions, E embedding, H hidden, R readout, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.alignment import Policy
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.steering import Detail, Steering
from nmt.model.decoder import Decoded, Decoder, Infer, Inferred
from nmt.model.encoder import Encoder
from nmt.model.latent import InferenceNetwork
from nmt.model.prediction import Prediction, copyable
from nmt.model.readout import Output
from nmt.model.recurrent import LayerWeights, RecurrentState
from nmt.model.state import DecoderState, Products, StepOutput
from nmt.ops.draws import Dropout, dropout, masked
from nmt.ops.linear import Linear
from nmt.ops.output_loss import Criterion, OutputLoss, cross_entropy


class Bridge(nn.Module):
    """The decoder's initial state: tanh(W summary) for every layer (Bahdanau et al. 2015, A.2.2; here of a summary of
    both directions)."""

    def __init__(self, summary_dim: int, layers: int, hidden: int, lstm: bool) -> None:
        super().__init__()
        self.shape = (layers * (2 if lstm else 1), hidden)
        self.layers = layers
        self.proj = Linear(summary_dim, self.shape[0] * hidden)

    def forward(self, summary: Tensor) -> RecurrentState:
        """(B, summary_dim) -> RecurrentState."""
        states = torch.tanh(self.proj(summary)).view(-1, *self.shape).unbind(1)
        return RecurrentState(tuple(states[: self.layers]), tuple(states[self.layers :]))


class EmbeddingDropout(Dropout):
    """Drops whole embedded tokens with probability `words` (Sennrich et al. 2016, the Edinburgh systems), then elements
    with probability p. The rest is divided by the probability of being kept, as in Nematus."""

    def __init__(self, p: float, words: float = 0.0, variational: bool = False) -> None:
        super().__init__(p, variational)
        self.words = words

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        return super().forward(self.drop_words(inputs))

    def drop_words(self, inputs: Tensor) -> Tensor:
        """(..., E) -> (..., E), whole tokens only."""
        return dropout(inputs, self.words, self.training, along=-1)


class Forced(NamedTuple):
    """Result of forced decoding."""

    log_probs: Tensor  # (B, T) of their tokens, 0 on padding
    weights: Tensor | None  # (B, T, S), row t used to produce token t; with latent positions their posterior
    detail: Detail | None = None


class Seq2Seq(nn.Module):
    """p(y | x), token by token. The token id `pad` marks padding."""

    def __init__(  # noqa: PLR0913
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
        fixed_context: bool,
    ) -> None:
        super().__init__()
        self.source_embedding, self.target_embedding = source_embedding, target_embedding
        self.encoder, self.bridge, self.decoder, self.output = encoder, bridge, decoder, output
        self.policy = policy  # trains sampled positions
        self.inference = inference  # trains a variational attention
        self.dropout = embedding_dropout
        self.fixed_context = fixed_context  # without attention: is the summary an input of every step?

    @property
    def models(self) -> "tuple[Seq2Seq, ...]":
        """The models that predict together: this one; see nmt.model.ensemble.Ensemble."""
        return (self,)

    @property
    def attends(self) -> bool:
        """Does the model have an attention?"""
        return self.decoder.attention is not None

    @property
    def has_copy_gate(self) -> bool:
        """Does the model copy source tokens, whose ids must then be those of target tokens?"""
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

    def encode_embedded(
        self,
        embedded: Tensor,
        lengths: Tensor,
        source: Tensor,
        products: Products | None = None,
        encoder_layers: Sequence[LayerWeights] | None = None,
    ) -> DecoderState:
        """(B, S, E), int64 (B,), int64 (B, S) -> the decoder's initial state. source: the tokens that may be copied,
        NEVER for one that may not; products, encoder_layers: prepared for all searches; by default they are prepared
        for this batch."""
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        valid = positions < lengths.to(embedded.device, non_blocking=True)[:, None]
        dropped = self.dropout(embedded)
        encoded = self.encoder(dropped, lengths, valid, encoder_layers)
        fixed = encoded.summary if self.fixed_context else None
        if products is None:
            B, E = embedded.shape[0], self.target_embedding.embedding_dim
            products = self.decoder.prepare(B, E, 0 if fixed is None else fixed.shape[1])
            products = replace(products, word_mask=self.dropout.sentence_mask(embedded, B, E))
        return self.decoder.start(
            self.bridge(encoded.summary),
            encoded,
            valid,
            products,
            # On a GPU, lengths cannot be read without waiting; there no sentence is empty.
            nonempty=lengths.is_cuda or bool((lengths > 0).all()),
            fixed=fixed,
            words=dropped,
            tokens=copyable(source, lengths) if self.has_copy_gate else source,
        )

    def forward(
        self,
        source: Tensor,
        lengths: Tensor,
        target: Tensor,
        target_out: Tensor | None = None,
    ) -> Decoded:
        """int64 (B, S), (B,), (B, T) = <s> y_1 ... y_{T-1} -> readouts (B, T, R), weights (B, T, S) or None.

        With `target_out`, int64 (B, T) = y_1 ... y_T, an inference network gives the weights of a latent position.
        """
        return self.decode(target, self.encode(source, lengths), target_out)

    def decode(self, target: Tensor, state: DecoderState, target_out: Tensor | None = None) -> Decoded:
        """int64 (B, T) = <s> y_1 ... y_{T-1}, the state before the first step; see `forward`."""
        embedded = masked(self._embed_target(target), state.products.word_mask)
        infer: Infer | None = None
        if self.inference is not None and target_out is not None:
            infer = partial(self._infer, target_out, state)
        return self.decoder.teacher_force(embedded, state, target, self.output, infer)

    def _infer(self, target_out: Tensor, state: DecoderState, prior: Tensor) -> Inferred:
        """int64 (B, T) = y_1 ... y_T, the state, the prior (B, T, S) -> what the inference network says."""
        assert self.inference is not None
        memory, _ = state.memory_and_past()
        lengths = target_out.ne(int(self.target_embedding.padding_idx or 0)).sum(1)
        embedded = masked(self._embed_target(target_out), state.products.word_mask)
        inferred: Inferred = self.inference(embedded, lengths, memory.values, prior)
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
        embedded = masked(self._embed_target(tokens), state.products.word_mask)
        prediction, weights, state = self.decoder.step(embedded, self.decoder.observe(state, tokens, layer))
        return StepOutput(prediction.logits(layer).flatten(0, -2), weights, state)

    def _embed_target(self, tokens: Tensor) -> Tensor:
        """int64 (...) -> (..., E), after dropout, except the variational one, whose mask is in the decoder's state."""
        embedded = self.target_embedding(tokens)
        dropped: Tensor = self.dropout.drop_words(embedded) if self.dropout.variational else self.dropout(embedded)
        return dropped


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(1, n, V), int64 (n,) -> (n,)."""
    _, nll = cross_entropy(logits[0], targets)
    return nll, {"nll": nll}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
