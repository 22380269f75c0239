"""The translation model: embeddings, encoder, bridge, decoder, output layer. And ensembles of several models.

Shapes: B batch, N rows of a step in a search (hypotheses), S source positions, T target positions, E width of an
embedding, R width of the readout, V vocabulary, K models.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from nmt.attention.alignment import Policy
from nmt.attention.attention import Detail, Steering
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.model.decoder import Decoded, Decoder, DecoderState, Infer, Inferred
from nmt.model.latent import InferenceNetwork
from nmt.model.output import Output, Prediction
from nmt.model.recurrent import Bridge, Encoder
from nmt.ops.draws import Dropout, dropout
from nmt.ops.output_loss import cross_entropy


class State(Protocol):
    """The state of a model as a search sees it: one row for each hypothesis."""

    def select(self, index: Tensor) -> Self:
        """Take the rows with the numbers `index`, int64 (N,). A row may be taken several times."""
        ...

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Take rows like `select`, in a state whose rows are grouped by sentence, equally many for each sentence.

        The rows of a group may share the memory of their sentence. sentences: int64 (A,), the numbers of the sentences
        that remain; None keeps all.
        """
        ...


StateT = TypeVar("StateT", bound=State)


class StepOutput(NamedTuple, Generic[StateT]):
    """What a model returns for one step of a search. Later steps must not overwrite these tensors."""

    logits: Tensor  # (N, V)
    weights: Tensor | None  # (N, S) attention weights from which the logits were computed; None without attention
    state: StateT


Step = Callable[[Tensor, StateT], StepOutput[StateT]]
"""A function from the previous tokens, int64 (N,), and a state of N rows to the output for the next token."""


class EmbeddingDropout(Dropout):
    """Drops whole embedded tokens with probability `words`, then single elements with probability p.

    Dropping whole tokens comes from Sennrich et al. (2016, the Edinburgh systems). What remains is divided by the
    probability of being kept, as in Nematus.
    """

    def __init__(self, p: float, words: float = 0.0) -> None:
        super().__init__(p)
        self.words = words

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.words:
            inputs = inputs * dropout(torch.ones_like(inputs[..., 0]), self.words, training=True)[..., None]
        return super().forward(inputs)


class Forced(NamedTuple):
    """The result of forced decoding."""

    log_probs: Tensor  # (B, T) log-probability of each target token; 0 at padding
    # (B, T, S) attention weights, or their posterior with a latent alignment; None without attention
    weights: Tensor | None
    detail: Detail | None = None  # what each head did, if asked for


class Seq2Seq(nn.Module):
    """The model p(y | x): it predicts the target y token by token from the source x."""

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
        self.policy = policy  # trains sampled positions by REINFORCE; None for other alignments
        self.inference = inference  # trains a variational attention; None for other alignments
        self.dropout = embedding_dropout

    @property
    def models(self) -> "tuple[Seq2Seq, ...]":
        """Return the models that predict together. Only an Ensemble has several."""
        return (self,)

    @property
    def attends(self) -> bool:
        """Return whether the model has an attention."""
        return self.decoder.attention is not None

    @property
    def has_copy_gate(self) -> bool:
        """Return whether the model copies source tokens. Source and target then share one vocabulary."""
        return self.decoder.copy is not None

    def return_log_weights(self) -> None:
        """Make the attention return log-weights, for guided alignment and variational attention."""
        if self.decoder.attention is not None:
            for module in self.decoder.attention.modules():
                if isinstance(module, SoftmaxNormalizer):
                    module.with_log_weights = True

    def encode(self, source: Tensor, lengths: Tensor, embedded: Tensor | None = None) -> DecoderState:
        """Encode source tokens int64 (B, S) with lengths int64 (B,) -> the decoder's initial state.

        The lengths are on the CPU, or on the GPU for a CUDA graph. embedded: (B, S, E) takes the place of the tokens'
        embeddings; then only a copy gate reads the tokens.
        """
        words = self.dropout(self.source_embedding(source) if embedded is None else embedded)
        encoded = self.encoder(words, lengths)
        parameters = self.decoder.collect_parameters()
        return self.decoder.initial_state(self.bridge(encoded.summary), encoded, parameters, source, words)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor, target_out: Tensor | None = None) -> Decoded:
        """Teacher-force: source int64 (B, S), lengths (B,), target (B, T) = <s> y_1 ... y_{T-1} -> Decoded. target_out:
        int64 (B, T) = y_1 ... y_T, from which an inference network infers the latent alignment in training."""
        return self.decode(target, self.encode(source, lengths), target_out)

    def decode(self, target: Tensor, state: DecoderState, target_out: Tensor | None = None) -> Decoded:
        """Teacher-force from the state before the first step. The other arguments are those of `forward`."""
        embedded = self.dropout(self.target_embedding(target))
        infer: Infer | None = None
        if self.inference is not None and target_out is not None:
            infer = partial(self._infer, target_out, state)
        decoded: Decoded = self.decoder(embedded, state, target, self.output, infer)
        return decoded

    def _infer(self, target_out: Tensor, state: DecoderState, prior: Tensor) -> Inferred:
        """Run the inference network: y_1 ... y_T int64 (B, T), prior (B, T, S) -> distribution q over positions."""
        assert self.inference is not None
        lengths = target_out.ne(int(self.target_embedding.padding_idx or 0)).sum(1)
        embedded = self.dropout(self.target_embedding(target_out))
        inferred: Inferred = self.inference(embedded, lengths, state.attended_source().memory.values, prior)
        return inferred

    @torch.no_grad()
    def log_probs(self, prediction: Prediction, targets: Tensor, pad: int) -> Tensor:
        """Compute log p(y_t | y_1 ... y_{t-1}, x) of y_1 ... y_T, int64 (B, T) -> (B, T), 0 at padding."""
        return -prediction.loss(self.output.layer(), targets, pad, _negative_log_likelihood).terms["nll"]

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
        """Score given targets by forced decoding.

        source: int64 (B, S) with lengths (B,); target_in: int64 (B, T) = <s> y_1 ... y_{T-1}; target_out: int64 (B, T)
        = y_1 ... y_T, both padded with `pad`; detailed: also return the attention's `Detail`.
        """
        state = self.encode(source, lengths)
        state = state if steering is None else state.steered(steering)
        decoded = self.decode(target_in, state.detailed() if detailed else state)
        embedded, counted = self.dropout(self.target_embedding(target_in)), target_out != pad
        weights = self.decoder.posterior(decoded, embedded, state, target_out, counted, self.output)
        detail = None if decoded.attention is None else decoded.attention.detail
        return Forced(self.log_probs(decoded.prediction, target_out, pad), weights, detail)


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood, as a criterion: logits (1, n, V), targets int64 (n,) -> (n,)."""
    _, nll = cross_entropy(logits[0], targets)
    return nll, {"nll": nll}


class EnsembleState(NamedTuple):
    """The states of the models' decoders; for the methods see DecoderState."""

    members: tuple[DecoderState, ...]

    def steered(self, steering: Steering) -> Self:
        return self._replace(members=tuple(member.steered(steering) for member in self.members))

    def select(self, index: Tensor) -> Self:
        return self._replace(members=tuple(member.select(index) for member in self.members))

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        return self._replace(members=tuple(member.branch(index, sentences) for member in self.members))


class SearchEnsemble:
    """An ensemble in a search: p(y_t | y_<t, x) = 1/K sum over k of p_k(y_t | y_<t, x)   (Sutskever et al. 2014, 3.6).

    The K models may differ in everything but their vocabularies. Attention weights are averaged over the models that
    have an attention.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        """members: Seq2Seq models, or search models; both have the methods `encode` and `step`."""
        self.members = tuple(members)

    def encode(self, source: Tensor, lengths: Tensor, vocabulary: Tensor | None = None) -> EnsembleState:
        """Encode source tokens int64 (B, S) with lengths int64 (B,) on the CPU -> the decoders' initial states.

        vocabulary: a shortlist, int64 (L,), or None, see nmt.translate.search_model.
        """
        return EnsembleState(tuple(member.encode(source, lengths, vocabulary) for member in self.members))

    def step(self, tokens: Tensor, state: EnsembleState) -> StepOutput[EnsembleState]:
        """Predict the next token from the previous tokens, int64 (N,). As logits it returns the log of the mean
        probabilities, float32 (N, V), and as weights the mean attention (N, S)."""
        steps = [member.step(tokens, its_state) for member, its_state in zip(self.members, state.members, strict=True)]
        log_probs = log_mean([step.logits.log_softmax(-1, dtype=torch.float32) for step in steps])
        return StepOutput(log_probs, _mean([s.weights for s in steps]), EnsembleState(tuple(s.state for s in steps)))


class Ensemble(nn.Module):
    """An ensemble of whole models, which scores given translations. See `SearchEnsemble` for what it predicts."""

    def __init__(self, models: Sequence[Seq2Seq]) -> None:
        super().__init__()
        self.models, self._registered = tuple(models), nn.ModuleList(models)

    @property
    def attends(self) -> bool:
        return any(model.attends for model in self.models)

    @property
    def has_copy_gate(self) -> bool:
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
        """Score targets like Seq2Seq.force, by the mean of the models' probabilities and attention; without detail."""
        forced = [model.force(source, lengths, target_in, target_out, pad, steering) for model in self.models]
        return Forced(log_mean([each.log_probs for each in forced]), _mean([each.weights for each in forced]))


def log_mean(log_probs: Sequence[Tensor]) -> Tensor:
    """Compute the log of the mean of K probabilities from their logs (...). The result is exact if all are equal."""
    highest = reduce(torch.maximum, log_probs)
    total = torch.zeros_like(highest)
    for member in log_probs:
        total += (member - highest).exp_()
    return total.div_(len(log_probs)).log_().add_(highest)


def _mean(weights: Sequence[Tensor | None]) -> Tensor | None:
    """Average the weights of the models that have an attention; None if none has."""
    present = [weight.float() for weight in weights if weight is not None]
    return torch.stack(present).mean(0) if present else None
