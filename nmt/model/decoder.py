"""The recurrent decoder: when it attends, what it feeds back, and its state between steps.

Shapes: B batch, N rows of a step (N = B in training; hypotheses in a search), S source positions, T target positions,
E width of an embedding, H width of a hidden state, M width of the memory, R width of the readout, P width of the
readout before its activation, G gates x H, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attended, Attention, Memory, MultiHeadAttention, Steering, join_steps
from nmt.attention.scores import Past
from nmt.model.output import (
    CopyGate,
    Copying,
    LexicalModel,
    Mixture,
    Output,
    OutputLayer,
    Prediction,
    Readout,
    Readouts,
    copyable,
)
from nmt.model.recurrent import (
    Encoded,
    LayerState,
    PreparedLayer,
    Recurrent,
    RecurrentState,
    UpperLayers,
    prepare_layers,
    run_rnn,
    step_layer,
)
from nmt.ops.draws import Dropout, dropout
from nmt.ops.products import defer, deferring, linear
from nmt.ops.trees import select


class StepAttention(Protocol):
    """An attention that attends step by step. `Attention` explains the methods."""

    @property
    def reads_past(self) -> bool: ...

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory: ...

    def start(self, valid: Tensor) -> Past: ...

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended: ...


@dataclass(frozen=True, kw_only=True)
class Products(ABC):
    """The matrix products of a decoder's steps. Their parameters are prepared once for a batch, or for all searches.

    Training represents a word by its embedding and a context by its vector. Search may represent a word or a context by
    its products with the parameters of gates and readout, computed in advance.
    """

    layers: Sequence[PreparedLayer]  # the recurrent layers, the lowest first
    conditional: PreparedLayer | None  # the layer of the second half of a conditional step
    readout: Readout
    attention: StepAttention | None
    lexical: LexicalModel | None

    def deferred(self) -> Self:
        """Return the products for a loop over steps, which defer the gradients of their parameters."""
        return self

    @abstractmethod
    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """Compute what previous words and the fixed vector add to the gates of the lowest layer -> (..., G)."""

    @abstractmethod
    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """Compute what context and previous readout, known only at the step, add to the gates of the lowest layer.

        context: (N, M) if the decoder attends before the step, else None; feed: the previous readout (N, R) with input
        feeding, else None. Returns (N, G), or None if both are None.
        """

    @abstractmethod
    def conditional_gates(self, context: Tensor) -> Tensor:
        """Compute the gates of the second half of a conditional step from the context: (N, M) -> (N, G)."""

    @abstractmethod
    def upper_input(self, context: Tensor) -> Tensor:
        """Return the context in the form that the layers above the first layer read: (N, M) -> (N, M)."""

    @abstractmethod
    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """Compute the readouts before dropout: outputs (..., H) of the top layer, contexts, words -> (..., R)."""

    @abstractmethod
    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """Compute the readout before its activation, without the context term: outputs (..., H), words -> (..., P)."""

    @abstractmethod
    def contexts(self, values: Tensor) -> Tensor:
        """Compute the context term that `read_out_partly` leaves out, for each position: (B, S, M) -> (B, S, P)."""


@dataclass(frozen=True, kw_only=True)
class BatchProducts(Products):
    """The products for one batch, with parameters in the precision of the computation.

    Words are embeddings (..., E), contexts are vectors (..., M).
    """

    # Three groups of columns of the first layer's weight_ih.
    word: Tensor  # (G, E) multiplies the previous word
    fixed: Tensor  # (G, M) multiplies the fixed vector; (G, 0) without one
    fed: Tensor  # (G, ...) multiplies the context and the previous readout, which only the step computes
    # Parts of the readout's W and b: (P, H + E) multiplies output and word, (P,) is added, (P, M) multiplies the
    # context. None unless predictions sum over source positions.
    readout_parts: tuple[Tensor, Tensor, Tensor] | None = None

    def deferred(self) -> Self:
        conditional, parts = self.conditional, self.readout_parts
        return replace(
            self,
            layers=[layer.deferred() for layer in self.layers],
            conditional=None if conditional is None else conditional.deferred(),
            fed=defer(self.fed)[0],
            readout_parts=None if parts is None else (*defer(*parts[:2]), parts[2]),
        )

    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        gates = linear(word, self.word, self.layers[0].bias_ih)
        if fixed is not None:
            of_fixed = linear(fixed, self.fixed)
            gates = gates + (of_fixed[:, None] if word.dim() == 3 else of_fixed)  # noqa: PLR2004
        return gates

    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        if context is None or feed is None:
            fed = feed if context is None else context
        else:
            fed = torch.cat([context, feed], dim=1)
        return None if fed is None else linear(fed, self.fed)

    def conditional_gates(self, context: Tensor) -> Tensor:
        assert self.conditional is not None
        return linear(context, self.conditional.weight_ih, self.conditional.bias_ih)

    def upper_input(self, context: Tensor) -> Tensor:
        return context

    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        readout: Tensor = self.readout(output, context, word)
        return readout

    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        assert self.readout_parts is not None
        inputs = torch.cat([output, word], dim=-1) if self.readout.sizes[2] else output
        return linear(inputs, *self.readout_parts[:2])

    def contexts(self, values: Tensor) -> Tensor:
        assert self.readout_parts is not None
        return linear(values, self.readout_parts[2])


class Pending(NamedTuple):
    """A step whose token is not known yet, so that its latent position has no posterior. K: candidate positions."""

    readouts: Tensor  # (N, K, R) readout for each candidate position
    weights: Tensor  # (N, K) prior probability of each candidate position
    positions: Tensor | None  # int64 (N, K) candidate source positions; None if they are all positions in order
    partial: Tensor  # (N, P) result of `read_out_partly`


class HypothesisState(NamedTuple):
    """The part of the state that differs between the hypotheses of a sentence."""

    recurrent: RecurrentState
    feed: Tensor | None  # (N, R) previous readout, with input feeding
    fixed: Tensor | None  # (N, M) encoder summary that every step reads as its context, without attention; in search
    # its products (N, C + R), see nmt.translate.prepared_model
    pending: Pending | None  # previous step, if its latent position has yet to get its posterior; else None


class SourceState(NamedTuple):
    """The part of the state that comes from the source. The hypotheses of a sentence share one row of it, unless the
    attention reads the past: then each hypothesis has its own row."""

    memory: Memory
    past: Past
    words: Tensor | None  # (B, S, E) embedded source, for the lexical model
    tokens: Tensor | None  # int64 (B, S) source tokens for a copy gate; NEVER stands for a token that cannot be copied
    contexts: Tensor | None  # (B, S, P) result of `Products.contexts`, for predictions that sum over source positions


class DecoderState(NamedTuple):
    """What one step passes to the next, and what all steps of a sentence share."""

    hypothesis: HypothesisState
    source: SourceState | None  # None without attention
    products: Products
    shares_source: bool = False  # do the hypotheses of a sentence share one row of `source`?

    def shared(self) -> Self:
        """Return the state for a loop over steps, which share the computations and gradients of products and memory."""
        source = self.source
        if source is not None:
            (contexts,) = (None,) if source.contexts is None else defer(source.contexts, cast=False)
            source = source._replace(memory=source.memory.shared(), contexts=contexts)
        return self._replace(products=self.products.deferred(), source=source)

    def attended_source(self) -> SourceState:
        """Return `source` of a decoder with attention, where it is not None."""
        assert self.source is not None
        return self.source

    def steered(self, steering: Steering) -> Self:
        """Return a state whose attention is steered at some steps. Call it before the first step."""
        return self._with_memory(lambda memory: memory.steered(steering))

    def detailed(self) -> Self:
        """Return a state whose attention also returns its `Detail`."""
        return self._with_memory(lambda memory: memory._replace(detailed=True))

    def _with_memory(self, change: Callable[[Memory], Memory]) -> Self:
        if self.source is None:
            return self
        return self._replace(source=self.source._replace(memory=change(self.source.memory)))

    def select(self, index: Tensor) -> Self:
        """Take the rows with the numbers `index`; a row may be taken several times."""
        return self._replace(hypothesis=select(self.hypothesis, index), source=select(self.source, index))

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses, whose rows are grouped by sentence, equally many for each sentence.

        sentences: numbers of the sentences to keep; None keeps all. A shared row of `source` is moved only if sentences
        are dropped.
        """
        hypothesis, source = select(self.hypothesis, index), self.source
        if source is None:
            pass
        elif self.shares_source:
            source = source if sentences is None else select(source, sentences)
        elif sentences is None and len(index) == source.memory.sentences:
            # All rows of a sentence have the same memory, so that only the past is reordered.
            source = source._replace(past=select(source.past, index))
        else:
            source = select(source, index)
        return self._replace(hypothesis=hypothesis, source=source)


class Inferred(NamedTuple):
    """The distribution q over source positions that an inference network derives from the whole target."""

    log_probs: Tensor  # (B, T, S) log q; -inf where the prior is 0
    weights: Tensor  # (B, T, S) q, or 1 at a sampled position and 0 elsewhere
    log_prob: Tensor | None  # (B, T) log q of the sampled position; None if no position was sampled


Infer = Callable[[Tensor], Inferred]
"""A function from the prior (B, T, S) over source positions to the distribution of an inference network."""


class Decoded(NamedTuple):
    """The result of teacher forcing."""

    readouts: Tensor  # (B, T, R); with a latent position, computed from the mean context
    prediction: Prediction
    attention: Attended | None = None  # weights and contexts of all T steps; None without attention
    inferred: Inferred | None = None  # result of an inference network, in training

    @property
    def weights(self) -> Tensor | None:
        """Return the attention weights (B, T, S); row t was used to predict token t."""
        return None if self.attention is None else self.attention.weights


Observe = Callable[[int, DecoderState], DecoderState]
"""A function from the number of a step and the state before it to the state that knows the previous token."""


class Decoder(nn.Module):
    """A recurrent network over [previous word; context or fixed vector; previous readout], and a readout.

    `attend` says when the decoder attends and where the context goes:

    - "before": the query is the previous state, and the context enters the recurrent step (Bahdanau et al. 2015,
      A.2.2).
    - "after": the query is the current state, and the context enters the readout only (Luong et al. 2015, section 3).
    - "between": a step has two halves. The first reads the word, its state is the query, and the context enters the
      second half, `conditional` (Sennrich et al. 2017, the conditional GRU of Nematus).
    - "first_layer": the query is the current state of the first layer, which depends on the words alone, and the
      context enters the layers above, `upper` (Wu et al. 2016, section 3; there with the previous state).

    Training and scoring call `forward`: by `forward_stepped` in a loop over the target positions, or by `forward_fused`
    for all of them at once. A search calls `step`.
    """

    sums_over_positions = False  # do predictions sum over a latent source position? True in LatentDecoder

    def __init__(  # noqa: PLR0913
        self,
        rnn: Recurrent,
        attention: Attention | MultiHeadAttention | None,
        readout: Readout,
        conditional: Recurrent | None = None,
        lexical: LexicalModel | None = None,
        upper: UpperLayers | None = None,
        copy: CopyGate | None = None,
        *,
        attend: Literal["before", "between", "after", "first_layer"],
        input_feeding: bool,
        word_dim: int,
        fixed_dim: int = 0,
        residual: int = 0,
        dropout: float = 0.0,
    ) -> None:
        """conditional: the layer of the second half of a step, for "between" only; lexical: adds its result to the
        readouts that predict, but not to the readout that is fed back; upper: the layers above `rnn`, for "first_layer"
        only; copy: lets predictions copy source tokens; word_dim: E; fixed_dim: M if every step reads the encoder's
        summary in place of a context, else 0; residual: see `prepare_layers`; dropout: probability, for the readout."""
        super().__init__()
        assert (attend == "between") == (conditional is not None)
        assert (attend == "first_layer") == (upper is not None)
        self.rnn, self.attention, self.readout, self.conditional = rnn, attention, readout, conditional
        self.lexical, self.upper, self.copy = lexical, upper, copy
        self.attend, self.input_feeding = attend, input_feeding
        self.word_dim, self.fixed_dim, self.residual, self.dropout = word_dim, fixed_dim, residual, Dropout(dropout)
        # Does a step need the attention or the readout of the previous step?
        self.stepped = input_feeding or (attention is not None and attend in ("before", "between"))

    def prepare(self) -> BatchProducts:
        """Prepare the products for all steps of a batch."""
        layers = prepare_layers(self.rnn, self.residual)
        layers += [] if self.upper is None else self.upper.prepare()
        weight = layers[0].weight_ih
        assert isinstance(weight, Tensor)
        widths = [self.word_dim, self.fixed_dim, self.rnn.input_size - self.word_dim - self.fixed_dim]
        word, fixed, fed = (part.contiguous() for part in torch.split(weight, widths, dim=1))
        return BatchProducts(
            layers=layers,
            conditional=None if self.conditional is None else prepare_layers(self.conditional)[0],
            readout=self.readout,
            attention=self.attention,
            lexical=self.lexical,
            word=word,
            fixed=fixed,
            fed=fed,
            readout_parts=self.readout.parts() if self.sums_over_positions else None,
        )

    def start(
        self, recurrent: RecurrentState, encoded: Encoded, products: Products, source: Tensor, words: Tensor
    ) -> DecoderState:
        """Make the state before the first step.

        source: int64 (B, S) source tokens, which a copy gate may copy; words: (B, S, E) the embedded source.
        """
        feed = encoded.summary.new_zeros(len(source), self.readout.dim) if self.input_feeding else None
        hypothesis = HypothesisState(recurrent, feed, encoded.summary if self.fixed_dim else None, None)
        attention = products.attention
        if attention is None:
            return DecoderState(hypothesis, None, products)
        memory = attention.remember(encoded.states, encoded.valid, nonempty=encoded.nonempty)
        state = SourceState(
            memory,
            attention.start(encoded.valid),
            words=None if self.lexical is None else words,
            tokens=None if self.copy is None else copyable(source, encoded.valid),
            contexts=products.contexts(memory.values) if self.sums_over_positions else None,
        )
        return DecoderState(hypothesis, state, products, shares_source=not attention.reads_past)

    def forward(
        self,
        embedded: Tensor,
        state: DecoderState,
        target: Tensor | None = None,
        output: Output | None = None,
        infer: Infer | None = None,
    ) -> Decoded:
        """Predict all T steps from the embeddings (B, T, E) of the target, int64 (B, T) = <s> y_1 ... y_{T-1}: in a
        loop if a step needs the attention or the readout of the previous step, else at once.

        Only latent decoders read `target`, `output` and `infer`: they compute the probabilities of the target tokens
        with `output`, and in training may take the distribution over source positions from `infer`.
        """
        return self.forward_stepped(embedded, state) if self.stepped else self.forward_fused(embedded, state)

    def observe(self, state: DecoderState, tokens: Tensor, output: OutputLayer) -> DecoderState:
        """Return the state that knows the previous tokens, int64 (N,), before a step.

        Only latent decoders change the state here: they compute the posterior of the previous step's position, which
        depends on the previous token.
        """
        return state

    def posterior(
        self, decoded: Decoded, embedded: Tensor, state: DecoderState, target: Tensor, counted: Tensor, output: Output
    ) -> Tensor | None:
        """Compute the attention weights (B, T, S) given the target y_1 ... y_T, int64 (B, T).

        Without a latent alignment these are the weights of `decoded`. counted: bool (B, T), False at padding.
        """
        return decoded.prediction.posterior_weights(decoded.weights, output.layer(), target)

    def forward_fused(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Predict all steps at once, with one call of each recurrent network and one of the attention."""
        outputs, attended = self._run_fused(embedded, state)
        return self._decoded(self._read_out_all(outputs, attended, embedded, state), attended, state)

    def forward_stepped(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Predict step by step. Products that do not depend on the previous step are computed before or after the loop,
        for all steps at once."""
        steps = self._run_steps(embedded, state)
        attentions = [step.attended for step in steps if step.attended is not None]
        attended = join_steps(attentions) if attentions else None
        return self._decoded(self._readouts(steps, attended, embedded, state), attended, state)

    def step(self, word: Tensor, state: DecoderState) -> tuple[Prediction, Tensor | None, DecoderState]:
        """Predict the next token: embedding (N, E) of the previous token -> prediction, weights (N, S), next state.

        word: in the form that `state.products` takes. With a copy gate the prediction is grouped by sentence. Without
        attention, the weights are None.
        """
        step = self._decode_step(state.products.word_gates(word, state.hypothesis.fixed), word, state)
        readout = step.readout
        if readout is None:
            readout = self._read_out(self._output(step.state.hypothesis.recurrent), step.context, word, state)
        weights = None if step.attended is None else step.attended.weights[:, 0]
        return self._predict(self._add_lexical(readout, weights, state), weights, state), weights, step.state

    def _run_fused(self, embedded: Tensor, state: DecoderState) -> tuple[Tensor, Attended | None]:
        """Compute the outputs (B, T, H) of the top layer and the attention of all steps at once."""
        lowest, layers = self.rnn.num_layers, state.products.layers
        hidden, final = self._run_words(embedded, state)
        attended = None
        if self.attention is not None:
            attended = self.attention.sequence(hidden, *state.attended_source()[:2])
        if self.upper is not None and attended is not None:
            start = state.hypothesis.recurrent.layers(lowest, len(layers))
            hidden, _ = self.upper(hidden, final, layers[lowest:], start=start, context=attended.context)
        return hidden, attended

    def _run_words(self, embedded: Tensor, state: DecoderState) -> tuple[Tensor, RecurrentState]:
        """Run `rnn` over all words, with the fixed vector if there is one -> outputs (B, T, H), final state."""
        inputs, fixed = embedded, state.hypothesis.fixed
        if fixed is not None:
            inputs = torch.cat([embedded, fixed[:, None].expand(-1, embedded.shape[1], -1)], dim=-1)
        lowest = self.rnn.num_layers
        start, layers = state.hypothesis.recurrent.layers(0, lowest), state.products.layers[:lowest]
        return run_rnn(self.rnn, inputs, None, start, layers, self.residual)

    def _run_steps(self, embedded: Tensor, state: DecoderState, observe: Observe | None = None) -> "list[DecoderStep]":
        gates = state.products.word_gates(embedded, state.hypothesis.fixed)
        steps: list[DecoderStep] = []
        state = state.shared()
        with deferring(self.attention, self.readout, self.lexical):
            for t, (gates_t, word) in enumerate(zip(gates.unbind(1), embedded.unbind(1), strict=True)):
                state = state if observe is None else observe(t, state)
                steps.append(self._decode_step(gates_t, word, state))
                state = steps[-1].state
        return steps

    def _readouts(
        self, steps: "list[DecoderStep]", attended: Attended | None, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """Collect the readouts (B, T, R) that were fed back, or compute the readouts of all steps at once."""
        fed_back = [step.readout for step in steps if step.readout is not None]
        if fed_back:
            return torch.stack(fed_back, dim=1)
        return self._read_out_all(self._outputs(steps), attended, embedded, state)

    def _outputs(self, steps: "list[DecoderStep]") -> Tensor:
        """Collect the outputs of the top layer (B, T, H)."""
        return torch.stack([self._output(step.state.hypothesis.recurrent) for step in steps], dim=1)

    def _decode_step(self, gates: Tensor, word: Tensor, state: DecoderState) -> "DecoderStep":
        attended, upper_context = None, None
        before, products = state.hypothesis, state.products
        if self.attend == "before":
            attended = self._query(self._output(before.recurrent), state)
        fed = products.fed_gates(None if attended is None else attended.context.squeeze(1), before.feed)
        gates = gates if fed is None else gates + fed
        first = step_layer(self.rnn, products.layers[0], gates, *before.recurrent.of(0))
        if self.attend == "between":
            attended = self._query(first[0], state)
            first = self._condition(first, attended, products)
        if self.attend == "first_layer":
            attended = self._query(first[0], state)
            upper_context = None if attended is None else products.upper_input(attended.context.squeeze(1))
        recurrent = self._step_upper_layers(first, before.recurrent, products, upper_context)
        output = self._output(recurrent)
        if self.attend == "after":
            attended = self._query(output, state)
        context = before.fixed if attended is None else attended.context.squeeze(1)
        readout = self._read_out(output, context, word, state) if self.input_feeding else None
        state = state._replace(hypothesis=before._replace(recurrent=recurrent, feed=readout))
        if state.source is not None and attended is not None:
            state = state._replace(source=state.source._replace(past=attended.past))
        return DecoderStep(attended, context, readout, state)

    def _condition(self, first: LayerState, attended: Attended | None, products: Products) -> LayerState:
        """Run the second half of a conditional step, which reads the context, from the state of the first half."""
        assert self.conditional is not None
        assert products.conditional is not None
        assert attended is not None
        gates = products.conditional_gates(attended.context.squeeze(1))
        return step_layer(self.conditional, products.conditional, gates, *first)

    def _step_upper_layers(
        self, first: LayerState, before: RecurrentState, products: Products, context: Tensor | None
    ) -> RecurrentState:
        """Step the layers above the first, given the first layer's new state.

        context: (N, M) is concatenated to the input of each of these layers, unless it is None.
        """
        steps, output = [first], first[0]
        for number, layer in enumerate(products.layers[1:], 1):
            inputs = output if context is None else torch.cat([output, context], dim=1)
            gates = linear(dropout(inputs, self.rnn.dropout, self.rnn.training), layer.weight_ih, layer.bias_ih)
            steps.append(step_layer(self.rnn, layer, gates, *before.of(number)))
            output = output + steps[-1][0] if layer.residual else steps[-1][0]
        cells = tuple(cell for _, cell in steps if cell is not None)
        return RecurrentState(tuple(hidden for hidden, _ in steps), cells)

    def _output(self, recurrent: RecurrentState) -> Tensor:
        """Return the top layer's output (N, H): its state, plus its input if it has a residual connection."""
        hidden, residual = recurrent.hidden, self.residual
        return sum(hidden[residual - 1 :], hidden[residual - 2]) if residual else hidden[-1]

    def _decoded(self, readouts: Tensor, attended: Attended | None, state: DecoderState) -> Decoded:
        """Add the lexical model to readouts (B, T, R) and predict from them."""
        if attended is None:
            return Decoded(readouts, Readouts(readouts))
        readouts = self._add_lexical(readouts, attended.weights, state)
        return Decoded(readouts, self._predict(readouts, attended.weights, state), attended)

    def _predict(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Prediction:
        """Make the prediction from readouts (B, T, R) and weights (B, T, S).

        For one step of a search, pass (N, R) and (N, S). With a copy gate, the prediction is then grouped by sentence:
        (B, N / B, ...).
        """
        if self.copy is None or weights is None:
            return Readouts(readouts)
        tokens = state.attended_source().tokens
        assert tokens is not None
        copying: Copying = self.copy(_by_sentence(readouts, len(tokens)), _by_sentence(weights, len(tokens)), tokens)
        return copying

    def _read_out_all(
        self, outputs: Tensor, attended: Attended | None, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """Compute the readouts of all steps at once: outputs (B, T, H), embeddings (B, T, E) -> (B, T, R)."""
        context, fixed = None if attended is None else attended.context, state.hypothesis.fixed
        if fixed is not None:
            context = fixed[:, None].expand(-1, outputs.shape[1], -1)
        return self._read_out(outputs, context, embedded, state)

    def _read_out(self, output: Tensor, context: Tensor | None, word: Tensor, state: DecoderState) -> Tensor:
        """Compute readouts with dropout: outputs (B, T, H), contexts (B, T, M), words (B, T, E) -> (B, T, R).

        For a single step, all shapes lack T.
        """
        readout: Tensor = self.dropout(state.products.read_out(output, context, word))
        return readout

    def _add_lexical(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Tensor:
        """Add the lexical model's result to readouts: (B, T, R), weights (B, T, S) -> (B, T, R).

        For a single step, all shapes lack T.
        """
        if state.products.lexical is None or weights is None:
            return readouts
        words = state.attended_source().words
        assert words is not None
        # `lexical` takes weights (B, T, S). In a search step, T is the number of hypotheses of a sentence, N / B.
        added: Tensor = state.products.lexical(_by_sentence(weights, len(words)), words)
        dropped: Tensor = self.dropout(added.view(readouts.shape))
        return readouts + dropped

    def _query(self, query: Tensor, state: DecoderState) -> Attended | None:
        """Attend with the queries (N, H) of one step, grouped by sentence -> Attended (N, 1, ...).

        Returns None without attention.
        """
        attention = state.products.attention
        if attention is None:
            return None
        memory, past = state.attended_source()[:2]
        # number of hypotheses that share one row of the memory
        hypotheses = query.shape[0] // memory.sentences
        attended = attention.step(query.view(memory.sentences, hypotheses, -1), memory, past)
        if hypotheses == 1:
            return attended
        context, weights = (part.flatten(0, 1)[:, None] for part in (attended.context, attended.weights))
        return Attended(context, weights, attended.past)


class DecoderStep(NamedTuple):
    """The result of one step."""

    attended: Attended | None  # weights and context of this step alone, T = 1
    context: Tensor | None  # (N, M) context of the attention, or the fixed vector
    readout: Tensor | None  # (N, R) with input feeding; None otherwise, where readouts are computed after the loop
    state: DecoderState  # state before the next step
    mixture: Mixture | None = None  # prediction of this step, if the next step reads the posterior of this step


def _by_sentence(rows: Tensor, sentences: int) -> Tensor:
    """Group rows by sentence: (N, D) -> (B, N / B, D). Rows that are grouped already, (B, T, D), stay as they are."""
    return rows.reshape(sentences, -1, rows.shape[-1])
