"""The recurrent decoder: when it attends, what it feeds back, its state between steps, and the two ways through it.

Shapes: B batch, N hypotheses (the rows of a step), S source positions, T target positions, E embedding, H hidden,
M memory, R readout, P what its activation gets, G gates x H, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from nmt.attention.attention import (
    Attended,
    Attention,
    Memory,
    MultiHeadAttention,
    Steering,
    join_steps,
)
from nmt.attention.scores import Past
from nmt.model.prediction import (
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
from nmt.ops.layers import Dropout, dropout, linear, loop, select


class State(Protocol):
    """What a search knows of a model's state: it has one row per hypothesis."""

    def select(self, index: Tensor) -> Self:
        """Take the rows `index`, int64 (M,), which may repeat."""
        ...

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Like `select`, but every sentence has the same number of rows, in a group; these may share its memory.

        sentences: int64 (A,), those that remain; by default all.
        """
        ...


StateT = TypeVar("StateT", bound=State)


class StepOutput(NamedTuple, Generic[StateT]):
    """Logits (N, V), the attention weights (N, S) they were computed with, and the state after the step.

    Weights are None without attention. Later steps must not overwrite them.
    """

    logits: Tensor
    weights: Tensor | None
    state: StateT


Step = Callable[[Tensor, StateT], StepOutput[StateT]]
"""Previous tokens, int64 (N,), and a state of N rows -> the output for the next token."""


class StepAttention(Protocol):
    """An attention that attends step by step; see Attention for its methods."""

    @property
    def reads_past(self) -> bool: ...

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory: ...

    def start(self, valid: Tensor) -> Past: ...

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended: ...


@dataclass(frozen=True, kw_only=True)
class Products(ABC):
    """What a decoder multiplies with at its steps, prepared once for a batch or for all searches.

    Training and search differ in what stands for a word and for a context: vectors, or their products with the
    parameters of gates and readout.
    """

    layers: Sequence[PreparedLayer]  # of the recurrent layers, the lowest first
    conditional: PreparedLayer | None  # of the second half of a conditional step
    readout: Readout
    attention: StepAttention | None
    lexical: LexicalModel | None

    @abstractmethod
    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """Compute what previous words and the fixed vector add to the lowest layer's gates, (..., G)."""

    @abstractmethod
    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """Compute what the step itself adds to the gates, (B, G): the context, if the decoder attends before the
        step, and the previous readout (B, R), if it is fed back."""

    @abstractmethod
    def conditional_gates(self, context: Tensor) -> Tensor:
        """Compute the context's gates (B, G) in the second half of a conditional step."""

    @abstractmethod
    def upper_input(self, context: Tensor) -> Tensor:
        """Return what the layers above the first read of the context, (B, M)."""

    @abstractmethod
    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """Read out: outputs (..., H) of the top layer, contexts, words -> readouts (..., R), before dropout."""

    @abstractmethod
    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """Compute what the readout's activation gets without a context: outputs (..., H), words -> (..., P)."""

    @abstractmethod
    def contexts(self, values: Tensor) -> Tensor:
        """Compute what each position adds to that as a context: the values of a memory (B, S, ...) -> (B, S, P)."""


@dataclass(frozen=True, kw_only=True)
class BatchProducts(Products):
    """The products for one batch: parameters in the precision of the computation.

    Words are embeddings (..., E), contexts are (..., M).
    """

    # Columns of the first layer's weight_ih, by what they multiply.
    word: Tensor  # (G, E): the previous word
    fixed: Tensor  # (G, M or 0): the fixed vector
    fed: Tensor  # (G, ...): what the step itself computes, that is context and previous readout
    readout_parts: tuple[Tensor, Tensor] | None = None  # (P, H + E), (P, M): without and for a context alone

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
        return linear(inputs, self.readout_parts[0], self.readout.proj.bias)

    def contexts(self, values: Tensor) -> Tensor:
        assert self.readout_parts is not None
        return linear(values, self.readout_parts[1])


class Pending(NamedTuple):
    """What the posterior of a latent position is computed from, once the token is known."""

    readouts: Tensor  # (N, K, R)
    weights: Tensor  # (N, K)
    positions: Tensor | None  # int64 (N, K)
    partial: Tensor  # (N, P) the readout's input without a context


class HypothesisState(NamedTuple):
    """What each hypothesis has of its own."""

    recurrent: RecurrentState
    feed: Tensor | None  # (N, R) the previous readout, with input feeding
    fixed: Tensor | None  # (N, M) without attention: the fixed context of every step
    pending: Pending | None  # of the previous step, if this step reads its posterior


class SourceState(NamedTuple):
    """What an attention and its decoder read of the source. Hypotheses of a sentence share its row unless the attention
    reads the past."""

    memory: Memory
    past: Past
    words: Tensor | None  # (B, S, E) the embedded source, for the lexical model
    tokens: Tensor | None  # int64 (B, S) the source's tokens for a copy gate, NEVER for those that are not copied
    contexts: Tensor | None  # (B, S, P) of each source position, for predictions that sum over them


class DecoderState(NamedTuple):
    """What one step passes to the next, and what all steps of a sentence share."""

    hypothesis: HypothesisState
    source: SourceState | None  # without attention None
    products: Products
    shares_source: bool = False  # do hypotheses of one sentence share its row of `source`?

    def attended_source(self) -> SourceState:
        """Return the source of a decoder that attends."""
        assert self.source is not None
        return self.source

    def steered(self, steering: Steering) -> Self:
        """Steer the attention at some steps; to be called before the first one."""
        return self._with_memory(lambda memory: memory.steered(steering))

    def detailed(self) -> Self:
        """Make the attention return its detail."""
        return self._with_memory(lambda memory: memory._replace(detailed=True))

    def _with_memory(self, change: Callable[[Memory], Memory]) -> Self:
        if self.source is None:
            return self
        return self._replace(source=self.source._replace(memory=change(self.source.memory)))

    def select(self, index: Tensor) -> Self:
        """Take the rows `index` of the batch, which may repeat, in evaluation: dropout masks stay those of the whole
        batch."""
        return self._replace(hypothesis=select(self.hypothesis, index), source=select(self.source, index))

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses. Rows are grouped by sentence, with equally many for each.

        sentences: those to keep, by default all. What their hypotheses share is stored once.
        """
        if not self.shares_source:
            return self.select(index)
        source = self.source if sentences is None else select(self.source, sentences)
        return self._replace(hypothesis=select(self.hypothesis, index), source=source)


class Inferred(NamedTuple):
    """What an inference network says of the positions, given the whole target."""

    log_probs: Tensor  # (B, T, S) log q, -inf where the prior is 0
    weights: Tensor  # (B, T, S) q, or one sampled position
    log_prob: Tensor | None  # (B, T) log q of the sampled position


Infer = Callable[[Tensor], Inferred]
"""The prior (B, T, S) -> what an inference network says of the positions."""


class Decoded(NamedTuple):
    """The result of teacher forcing."""

    readouts: Tensor  # (B, T, R), computed from the mean context
    prediction: Prediction
    attention: Attended | None = None  # at all steps
    inferred: Inferred | None = None  # by an inference network in training

    @property
    def weights(self) -> Tensor | None:
        """(B, T, S), row t used to produce token t."""
        return None if self.attention is None else self.attention.weights


Observe = Callable[[int, DecoderState], DecoderState]
"""A step's number and the state before it -> the state in which the previous token is known."""


class Decoder(nn.Module):
    """A recurrent network over [previous word; context or fixed vector; previous readout], and a readout.

    attend "before": the query is the previous state, and the context enters the recurrent step (Bahdanau et al.
    2015, A.2.2); "after": the query is the current state (Luong et al. 2015, 3); "between": the step is two, the
    query is the state after the first, over the word, and the context enters the second, `conditional` (Sennrich et
    al. 2017, the conditional GRU of Nematus). "first_layer": the query is the first layer's current state, which
    depends on the words alone, and the context enters the layers above, `upper` (Wu et al. 2016, 3; here with the
    current state).
    """

    sums_over_positions = False  # do predictions sum over a latent source position?

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
        """conditional: one layer over the context, for "between" only; lexical: its result is added to the readout, but
        not fed back; upper: the layers above the one of `rnn`, for "first_layer" only; copy: what it makes of a
        prediction, see CopyGate; word_dim: E; fixed_dim: M if every step reads the encoder's summary in place of a
        context, else 0; residual: see `prepare_layers`; dropout: of the readout."""
        super().__init__()
        assert (attend == "between") == (conditional is not None)
        assert (attend == "first_layer") == (upper is not None)
        self.rnn, self.attention, self.readout, self.conditional = rnn, attention, readout, conditional
        self.lexical, self.upper, self.copy = lexical, upper, copy
        self.attend, self.input_feeding = attend, input_feeding
        self.word_dim, self.fixed_dim, self.residual, self.dropout = word_dim, fixed_dim, residual, Dropout(dropout)
        # Does the attention or readout of a step enter the next step?
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
        """Make the state before the first step. source: int64 (B, S), the tokens that may be copied, NEVER for one that
        may not; words: (B, S, E), the embedded source."""
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

    def teacher_force(
        self, embedded: Tensor, state: DecoderState, target: Tensor, output: Output, infer: Infer | None = None
    ) -> Decoded:
        """Predict all T steps from (B, T, E) embeddings of the target, int64 (B, T) = <s> y_1 ... y_{T-1}.

        Where a prediction sums over a latent position, `output` gives the probabilities of the target's tokens, and
        `infer` the weights of the positions in training."""
        decoded: Decoded = self(embedded, state)
        return decoded

    def observe(self, state: DecoderState, tokens: Tensor, output: OutputLayer) -> DecoderState:
        """Tell the state the previous tokens, int64 (N,), before a step: only the posterior of a latent position
        depends on them."""
        return state

    def posterior(
        self, decoded: Decoded, embedded: Tensor, state: DecoderState, target: Tensor, counted: Tensor, output: Output
    ) -> Tensor | None:
        """Compute the attention weights (B, T, S) given the target y_1 ... y_T, int64 (B, T), and bool (B, T), False on
        padding: only a latent position depends on the target."""
        return decoded.prediction.posterior_weights(decoded.weights, output.layer(), target)

    def forward(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """(B, T, E) embeddings of <s> y_1 ... y_{T-1} -> Decoded with all T steps."""
        return self.forward_stepped(embedded, state) if self.stepped else self.forward_fused(embedded, state)

    def forward_fused(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Predict with one call of each recurrent network and one product for the attention of all steps."""
        outputs, attended = self._run_fused(embedded, state)
        return self._decoded(self._read_out_all(outputs, attended, embedded, state), attended, state)

    def forward_stepped(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Predict step by step; what does not depend on the previous step is computed before or after the loop."""
        steps = self._run_steps(embedded, state)
        attentions = [step.attended for step in steps if step.attended is not None]
        attended = join_steps(attentions) if attentions else None
        return self._decoded(self._readouts(steps, attended, embedded, state), attended, state)

    def step(self, word: Tensor, state: DecoderState) -> tuple[Prediction, Tensor | None, DecoderState]:
        """(B, E) embedding of the previous token, or what else the products take for it -> prediction, for hypotheses
        grouped by sentence if it has a T; weights (B, S) or None; next state."""
        step = self._decode_step(state.products.word_gates(word, state.hypothesis.fixed), word, state)
        readout = step.readout
        if readout is None:
            readout = self._read_out(self._output(step.state.hypothesis.recurrent), step.context, word, state)
        weights = None if step.attended is None else step.attended.weights[:, 0]
        return self._predict(self._add_lexical(readout, weights, state), weights, state), weights, step.state

    def _run_fused(self, embedded: Tensor, state: DecoderState) -> tuple[Tensor, Attended | None]:
        """Compute the outputs (B, T, H) of the top layer, and the attention of all steps."""
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
        """Run the recurrent network `rnn`, which reads words alone -> outputs (B, T, H) and last states."""
        inputs, fixed = embedded, state.hypothesis.fixed
        if fixed is not None:
            inputs = torch.cat([embedded, fixed[:, None].expand(-1, embedded.shape[1], -1)], dim=-1)
        lowest = self.rnn.num_layers
        start, layers = state.hypothesis.recurrent.layers(0, lowest), state.products.layers[:lowest]
        return run_rnn(self.rnn, inputs, None, start, layers, self.residual)

    def _run_steps(self, embedded: Tensor, state: DecoderState, observe: Observe | None = None) -> "list[DecoderStep]":
        gates = state.products.word_gates(embedded, state.hypothesis.fixed)
        steps: list[DecoderStep] = []
        with loop():
            for t, (gates_t, word) in enumerate(zip(gates.unbind(1), embedded.unbind(1), strict=True)):
                state = state if observe is None else observe(t, state)
                steps.append(self._decode_step(gates_t, word, state))
                state = steps[-1].state
        return steps

    def _readouts(
        self, steps: "list[DecoderStep]", attended: Attended | None, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """(B, T, R) of all steps."""
        fed_back = [step.readout for step in steps if step.readout is not None]
        if fed_back:
            return torch.stack(fed_back, dim=1)
        return self._read_out_all(self._outputs(steps), attended, embedded, state)

    def _outputs(self, steps: "list[DecoderStep]") -> Tensor:
        """(B, T, H)."""
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
        """Take the second half of a conditional step: from the state after the word to the state after the context."""
        assert self.conditional is not None
        assert products.conditional is not None
        assert attended is not None
        gates = products.conditional_gates(attended.context.squeeze(1))
        return step_layer(self.conditional, products.conditional, gates, *first)

    def _step_upper_layers(
        self, first: LayerState, before: RecurrentState, products: Products, context: Tensor | None
    ) -> RecurrentState:
        """Step the layers above the first, given the first layer's new state. `context`, (B, M) or None,
        is concatenated to the input of each of them."""
        steps, output = [first], first[0]
        for number, layer in enumerate(products.layers[1:], 1):
            inputs = output if context is None else torch.cat([output, context], dim=1)
            gates = linear(dropout(inputs, self.rnn.dropout, self.rnn.training), layer.weight_ih, layer.bias_ih)
            steps.append(step_layer(self.rnn, layer, gates, *before.of(number)))
            output = output + steps[-1][0] if layer.residual else steps[-1][0]
        cells = tuple(cell for _, cell in steps if cell is not None)
        return RecurrentState(tuple(hidden for hidden, _ in steps), cells)

    def _output(self, recurrent: RecurrentState) -> Tensor:
        """Return the top layer's output (B, H): its state, plus the output below it with a residual connection."""
        hidden, residual = recurrent.hidden, self.residual
        return sum(hidden[residual - 1 :], hidden[residual - 2]) if residual else hidden[-1]

    def _decoded(self, readouts: Tensor, attended: Attended | None, state: DecoderState) -> Decoded:
        """Predict from readouts (B, T, R), before the lexical model."""
        if attended is None:
            return Decoded(readouts, Readouts(readouts))
        readouts = self._add_lexical(readouts, attended.weights, state)
        return Decoded(readouts, self._predict(readouts, attended.weights, state), attended)

    def _predict(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Prediction:
        """(B, T, R), (B, T, S) or None, or without T -> the prediction; with a copy gate grouped by sentence."""
        if self.copy is None or weights is None:
            return Readouts(readouts)
        tokens = state.attended_source().tokens
        assert tokens is not None
        copying: Copying = self.copy(_by_sentence(readouts, len(tokens)), _by_sentence(weights, len(tokens)), tokens)
        return copying

    def _read_out_all(
        self, outputs: Tensor, attended: Attended | None, embedded: Tensor, state: DecoderState
    ) -> Tensor:
        """Outputs (B, T, H) of the top layer, embeddings (B, T, E) -> (B, T, R), all steps at once."""
        context, fixed = None if attended is None else attended.context, state.hypothesis.fixed
        if fixed is not None:
            context = fixed[:, None].expand(-1, outputs.shape[1], -1)
        return self._read_out(outputs, context, embedded, state)

    def _read_out(self, output: Tensor, context: Tensor | None, word: Tensor, state: DecoderState) -> Tensor:
        """(B, T, H), (B, T, M) or None, (B, T, E), or without T -> (B, T, R) or (B, R), after dropout."""
        readout: Tensor = self.dropout(state.products.read_out(output, context, word))
        return readout

    def _add_lexical(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Tensor:
        """(B, T, R), (B, T, S) or None, or without T -> (B, T, R) or (B, R), plus the lexical model's result."""
        if state.products.lexical is None or weights is None:
            return readouts
        words = state.attended_source().words
        assert words is not None
        # Hypotheses of a sentence come as if they were its steps.
        added: Tensor = state.products.lexical(_by_sentence(weights, len(words)), words)
        dropped: Tensor = self.dropout(added.view(readouts.shape))
        return readouts + dropped

    def _query(self, query: Tensor, state: DecoderState) -> Attended | None:
        """Queries (N, H) of one step, grouped by sentence -> Attended (N, 1, ...), or None without attention."""
        attention = state.products.attention
        if attention is None:
            return None
        memory, past = state.attended_source()[:2]
        hypotheses = query.shape[0] // memory.sentences  # per sentence; more than one if they share its memory
        attended = attention.step(query.view(memory.sentences, hypotheses, -1), memory, past)
        if hypotheses == 1:
            return attended
        context, weights = (part.flatten(0, 1)[:, None] for part in (attended.context, attended.weights))
        return Attended(context, weights, attended.past)


class DecoderStep(NamedTuple):
    """One step, T = 1."""

    attended: Attended | None
    context: Tensor | None  # (B, M) of the attention, or the fixed vector
    readout: Tensor | None  # (B, R), if it is fed back; else computed for all steps at once
    state: DecoderState  # the next one
    mixture: Mixture | None = None  # if the next step reads its posterior


def _by_sentence(rows: Tensor, sentences: int) -> Tensor:
    """(B, T, D), or (N, D) grouped by sentence -> (B, T, D)."""
    return rows.reshape(sentences, -1, rows.shape[-1])
