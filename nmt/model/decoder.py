"""The recurrent decoder: when it attends, what it feeds back, and its state between steps.

Shapes: B batch, N rows of a step (N = B in training; hypotheses in a search), S source positions, T target positions,
E width of an embedding, H width of a hidden state, M width of the memory, R width of the readout, P width of the
readout before its activation, G gates x H, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

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
    LayerParameters,
    Recurrent,
    RecurrentState,
    UpperLayers,
    collect_layers,
    run_rnn,
    step_layer,
)
from nmt.ops.draws import Dropout
from nmt.ops.products import Weight, defer, deferring, in_autocast_dtype, linear
from nmt.ops.trees import select


@dataclass(frozen=True, kw_only=True)
class StepParameters:
    """The parameters of a decoder's steps, collected once for a batch, or packed for all searches.

    A step gets words and contexts already multiplied with the parameters of the gates and the readout: in training for
    all steps at once, wherever no step has to wait for them, in a search from tables. `context` adds C numbers to
    recurrent layers: C is G if the gates of one layer read the context, M if all layers above the first read it, 0 if
    none does.
    """

    layers: Sequence[LayerParameters]  # the recurrent layers, the lowest first
    conditional: LayerParameters | None  # the layer of the second half of a conditional step
    attention: Attention | MultiHeadAttention | None
    lexical: LexicalModel | None
    word: Tensor  # (G, E)
    word_readout: Tensor | None  # (P, E); None if the readout reads no word
    context: Weight  # (C, M); or (C + P, M) if each step computes its readout: with input feeding, and in a search
    context_bias: Tensor | None  # (C,) or (C + P,): the bias of the second half of a conditional step, else None
    context_readout: Tensor  # (P, M)
    context_width: int  # C
    feed: Weight | None  # (G, R) multiplies the previous readout; None without input feeding
    output: Weight  # (P, H) multiplies the top layer's output
    output_bias: Tensor | None  # (P,); None in a search, where the products of words contain it
    multiplied_memory: bool = False  # is the memory multiplied with `context`, in place of each step's context?


class WordProducts(NamedTuple):
    """What a word adds to the first layer's gates and to the readout."""

    gates: Tensor  # (N, G), with the bias
    readout: Tensor | None  # (N, P); None if the readout reads no word


class Pending(NamedTuple):
    """A step whose token is not known yet, so that its latent position has no posterior. K: candidate positions."""

    readouts: Tensor  # (N, K, R) readout for each candidate position
    weights: Tensor  # (N, K) prior probability of each candidate position
    positions: Tensor | None  # int64 (N, K) candidate source positions; None if they are all positions in order
    partial: Tensor  # (N, P) readout before its activation, without the context


class HypothesisState(NamedTuple):
    """The part of the state that differs between the hypotheses of a sentence."""

    recurrent: RecurrentState
    feed: Tensor | None  # (N, R) previous readout, with input feeding
    fixed: Tensor | None  # (N, M) encoder summary that every step reads as its context, without attention; in a search
    # its products with `StepParameters.context`, (N, C + P)
    pending: Pending | None  # previous step, if its latent position has yet to get its posterior; else None


class SourceState(NamedTuple):
    """The part of the state that comes from the source. The hypotheses of a sentence share one row of it, unless the
    attention reads the past: then each hypothesis has its own row."""

    memory: Memory
    past: Past | None  # None before the first step
    words: Tensor | None  # (B, S, E) embedded source, for the lexical model
    tokens: Tensor | None  # int64 (B, S) source tokens for a copy gate; NEVER stands for a token that cannot be copied
    contexts: Tensor | None  # (B, S, P) what each position adds to the readout, for predictions that sum over positions


class DecoderState(NamedTuple):
    """What one step passes to the next, and what all steps of a sentence share."""

    hypothesis: HypothesisState
    source: SourceState | None  # None without attention
    parameters: StepParameters
    shares_source: bool = False  # do the hypotheses of a sentence share one row of `source`?

    def deferred(self) -> Self:
        """Return the state for a loop over steps, which defers the gradients of parameters and memory to its end."""
        given, source = self.parameters, self.source
        context, context_bias = defer(given.context, given.context_bias)
        output, output_bias = defer(given.output, given.output_bias)
        parameters = replace(
            given,
            layers=[layer.deferred() for layer in given.layers],
            conditional=None if given.conditional is None else given.conditional.deferred(),
            context=context,
            context_bias=context_bias,
            feed=defer(given.feed)[0],
            output=output,
            output_bias=output_bias,
        )
        if source is not None:
            (contexts,) = defer(source.contexts, cast=False)
            source = source._replace(memory=source.memory.deferred(), contexts=contexts)
        return self._replace(parameters=parameters, source=source)

    def attended_source(self) -> SourceState:
        """Return `source` for a decoder with attention, where it is never None."""
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
        """Take the rows `index` of the hypotheses, each within its own sentence: the rows are grouped by sentence, and
        there are equally many for each, before and after.

        sentences: numbers of the sentences to keep; None keeps all. A shared row of `source` is moved only if sentences
        are dropped.
        """
        hypothesis, source = select(self.hypothesis, index), self.source
        if self.shares_source:
            source = source if sentences is None else select(source, sentences)
        elif source is not None and sentences is None and len(index) == source.memory.sentences:
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

    Training and scoring call `forward`: in a loop over the target positions, or for all of them at once if no step
    needs the attention or the readout of the previous one. A search calls `step`.
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
        residual: int = 0,
        dropout: float = 0.0,
    ) -> None:
        """readout: reads the encoder's summary at every step if it reads a context, but there is no attention;
        conditional: the layer of the second half of a step, for "between" only; lexical: adds its result to the
        readouts that predict, but not to the readout that is fed back; upper: the layers above `rnn`, for "first_layer"
        only; copy: lets predictions copy source tokens; residual: see `collect_layers`; dropout: probability, for the
        readout."""
        super().__init__()
        assert (attend == "between") == (conditional is not None)
        assert (attend == "first_layer") == (upper is not None)
        assert attend == "after" or attention is not None
        self.rnn, self.attention, self.readout, self.conditional = rnn, attention, readout, conditional
        self.lexical, self.upper, self.copy = lexical, upper, copy
        self.attend, self.input_feeding, self.residual, self.dropout = attend, input_feeding, residual, Dropout(dropout)
        self.layer_dropout = Dropout(rnn.dropout) if upper is None else upper.dropout
        # Does a step need the attention or the readout of the previous step?
        self.stepped = input_feeding or attend in ("before", "between")

    def collect_parameters(self) -> StepParameters:
        """Collect the parameters of a step, converted once per batch to the dtype of products under autocast, and split
        by what they multiply."""
        layers = collect_layers(self.rnn, self.residual) + ([] if self.upper is None else self.upper.collect_layers())
        conditional = None if self.conditional is None else collect_layers(self.conditional)[0]
        output, readout, word_readout = torch.split(
            in_autocast_dtype(self.readout.proj.weight), self.readout.sizes, dim=1
        )
        P, M = readout.shape
        gates = layers[0].weight_ih
        assert isinstance(gates, Tensor)
        # The first layer reads [word; context or fixed vector; previous readout].
        read = M if self.attend == "before" or self.attention is None else 0
        fed = self.readout.dim if self.input_feeding else 0
        word, context, feed = torch.split(gates, [gates.shape[1] - read - fed, read, fed], dim=1)
        bias: Tensor | None = None
        if conditional is not None:
            assert isinstance(conditional.weight_ih, Tensor)
            context, bias = conditional.weight_ih, conditional.bias_ih
        elif self.attend == "first_layer":
            context = torch.eye(M, dtype=gates.dtype, device=gates.device)
        elif self.attention is not None and not read:
            context = gates.new_empty(0, M)
        width = len(context)
        if self.input_feeding:
            context, bias = torch.cat([context, readout]), None if bias is None else nn.functional.pad(bias, (0, P))
        return StepParameters(
            layers=layers,
            conditional=conditional,
            attention=self.attention,
            lexical=self.lexical,
            word=word.contiguous(),
            word_readout=word_readout.contiguous() if word_readout.shape[1] else None,
            context=context.contiguous(),
            context_bias=bias,
            context_readout=readout.contiguous(),
            context_width=width,
            feed=feed.contiguous() if self.input_feeding else None,
            output=output.contiguous(),
            output_bias=in_autocast_dtype(self.readout.proj.bias),
        )

    def initial_state(
        self, recurrent: RecurrentState, encoded: Encoded, parameters: StepParameters, source: Tensor, words: Tensor
    ) -> DecoderState:
        """Make the state before the first step. recurrent: the bridge's result; source: int64 (B, S) source tokens,
        which a copy gate may copy; words: (B, S, E) the embedded source."""
        feed = encoded.summary.new_zeros(len(source), self.readout.dim) if self.input_feeding else None
        attention = parameters.attention
        if attention is None:
            fixed = encoded.summary if self.readout.sizes[1] else None
            return DecoderState(HypothesisState(recurrent, feed, fixed, None), None, parameters)
        memory = attention.remember(encoded.states, encoded.valid, nonempty=encoded.nonempty)
        contexts = None
        if parameters.multiplied_memory:
            memory = memory._replace(values=linear(memory.values, parameters.context))
        if self.sums_over_positions and parameters.multiplied_memory:
            contexts = memory.values[..., parameters.context_width :].contiguous()
        elif self.sums_over_positions:
            contexts = linear(memory.values, parameters.context_readout)
        state = SourceState(
            memory,
            past=None,
            words=None if self.lexical is None else words,
            tokens=None if self.copy is None else copyable(source, encoded.valid),
            contexts=contexts,
        )
        hypothesis = HypothesisState(recurrent, feed, None, None)
        return DecoderState(hypothesis, state, parameters, shares_source=not attention.reads_past)

    def forward(
        self,
        embedded: Tensor,
        state: DecoderState,
        target: Tensor | None = None,
        output: Output | None = None,
        infer: Infer | None = None,
    ) -> Decoded:
        """Predict all T steps from the embeddings (B, T, E) of the target, int64 (B, T) = <s> y_1 ... y_{T-1}.

        Only latent decoders read `target`, `output` and `infer`: they compute the probabilities of the target tokens
        with `output`, and in training may take the distribution over source positions from `infer`.
        """
        words = self._word_readouts(embedded, state)
        run = self._run_steps(embedded, words, state) if self.stepped else self._run_fused(embedded, state)
        readouts, weights = self._readouts(run, words, state), None if run.attended is None else run.attended.weights
        prediction = self._predict(readouts, weights, state)
        return Decoded(prediction.readouts, prediction, run.attended)

    def observe(self, state: DecoderState, tokens: Tensor, output: OutputLayer) -> DecoderState:
        """Return the state that knows the previous tokens, int64 (N,), before a step. Only latent decoders change the
        state here: they compute the posterior of the previous step's position, which depends on the previous token."""
        return state

    def posterior(
        self, decoded: Decoded, embedded: Tensor, state: DecoderState, target: Tensor, counted: Tensor, output: Output
    ) -> Tensor | None:
        """Compute the attention weights (B, T, S) given the target y_1 ... y_T, int64 (B, T). Without a latent
        alignment these are the weights of `decoded`. counted: bool (B, T), False at padding."""
        return decoded.prediction.posterior_weights(decoded.weights, output.layer(), target)

    def step(self, word: WordProducts, state: DecoderState) -> tuple[Prediction, Tensor | None, DecoderState]:
        """Predict the next token from the previous one, in a search -> prediction, weights (N, S), next state. With a
        copy gate the prediction is grouped by sentence. Without attention, the weights are None."""
        step = self._decode_step(word, state)
        readout, weights = step.readout, None if step.attended is None else step.attended.weights[:, 0]
        if readout is None:
            readout = self._read_out(step.output, step.context, word.readout, state.parameters)
        return self._predict(readout, weights, state), weights, step.state

    def _word_readouts(self, embedded: Tensor, state: DecoderState) -> Tensor | None:
        """Compute what words, and the fixed vector if there is one, add to the readouts: (B, T, E) -> (B, T, P)."""
        parameters, fixed = state.parameters, state.hypothesis.fixed
        words = None if parameters.word_readout is None else linear(embedded, parameters.word_readout)
        if fixed is None:
            return words
        fixed = linear(fixed, parameters.context_readout)[:, None]
        return fixed.expand(-1, embedded.shape[1], -1) if words is None else words + fixed

    def _run_fused(self, embedded: Tensor, state: DecoderState) -> "Run":
        """Run all T steps at once, with one call of each recurrent network and one of the attention."""
        outputs, final = self._run_words(embedded, state)
        if self.attention is None:
            return Run(outputs)
        attended = self.attention.sequence(outputs, *state.attended_source()[:2])
        if self.upper is not None:
            lowest, layers = self.rnn.num_layers, state.parameters.layers
            initial = state.hypothesis.recurrent.layers(lowest, len(layers))
            outputs, _ = self.upper(outputs, final, layers[lowest:], initial=initial, context=attended.context)
        return Run(outputs, attended)

    def _run_words(self, embedded: Tensor, state: DecoderState) -> tuple[Tensor, RecurrentState]:
        """Run `rnn` over all words, with the fixed vector if there is one -> outputs (B, T, H), final state."""
        inputs, fixed = embedded, state.hypothesis.fixed
        if fixed is not None:
            inputs = torch.cat([embedded, fixed[:, None].expand(-1, embedded.shape[1], -1)], dim=-1)
        lowest = self.rnn.num_layers
        initial, layers = state.hypothesis.recurrent.layers(0, lowest), state.parameters.layers[:lowest]
        return run_rnn(self.rnn, inputs, None, initial, layers, self.residual)

    def _run_steps(
        self, embedded: Tensor, words: Tensor | None, state: DecoderState, observe: Observe | None = None
    ) -> "Run":
        """Run the T steps one after another. words: the result of `_word_readouts`."""
        parameters, fixed = state.parameters, state.hypothesis.fixed
        gates = linear(embedded, parameters.word, parameters.layers[0].bias_ih)
        if fixed is not None:
            gates = gates + linear(fixed, parameters.context)[:, None, : parameters.context_width]
        readouts = [None] * gates.shape[1] if words is None else words.unbind(1)
        steps: list[DecoderStep] = []
        state = state.deferred()
        with deferring(self.attention, self.lexical):
            for t, word in enumerate(map(WordProducts, gates.unbind(1), readouts)):
                state = state if observe is None else observe(t, state)
                steps.append(self._decode_step(word, state))
                state = steps[-1].state
        attentions = [step.attended for step in steps if step.attended is not None]
        fed_back = [step.readout for step in steps if step.readout is not None]
        return Run(
            torch.stack([step.output for step in steps], dim=1),
            join_steps(attentions) if attentions else None,
            torch.stack(fed_back, dim=1) if fed_back else None,
            steps,
        )

    def _decode_step(self, word: WordProducts, state: DecoderState) -> "DecoderStep":
        """Decode one step of all rows: attend and run the layers, in the order that `attend` says."""
        before, parameters = state.hypothesis, state.parameters
        attended = context = upper = None
        gates = word.gates
        if self.attend == "before":
            # The query is the top layer's output: its state, plus its input if it has a residual connection.
            hidden, residual = before.recurrent.hidden, self.residual
            query = sum(hidden[residual - 1 :], hidden[residual - 2]) if residual else hidden[-1]
            attended, into_gates, context = self._query(query, state)
            gates = gates + into_gates
        if before.feed is not None and parameters.feed is not None:
            gates = gates + linear(before.feed, parameters.feed)
        first = step_layer(self.rnn, parameters.layers[0], gates, *before.recurrent.of(0))
        if self.conditional is not None and parameters.conditional is not None:
            attended, into_gates, context = self._query(first[0], state)
            first = step_layer(self.conditional, parameters.conditional, into_gates, *first)
        if self.attend == "first_layer":
            attended, upper, context = self._query(first[0], state)
        layers, output = [first], first[0]
        for number, layer in enumerate(parameters.layers[1:], 1):
            inputs = output if upper is None else torch.cat([output, upper], dim=1)
            gates = linear(self.layer_dropout(inputs), layer.weight_ih, layer.bias_ih)
            layers.append(step_layer(self.rnn, layer, gates, *before.recurrent.of(number)))
            output = output + layers[-1][0] if layer.residual else layers[-1][0]
        cells = tuple(cell for _, cell in layers if cell is not None)
        recurrent = RecurrentState(tuple(hidden for hidden, _ in layers), cells)
        if self.attend == "after" and self.attention is not None:
            attended, _, context = self._query(output, state)
        readout = self._read_out(output, context, word.readout, parameters) if self.input_feeding else None
        state = state._replace(hypothesis=before._replace(recurrent=recurrent, feed=readout))
        if state.source is not None and attended is not None:
            state = state._replace(source=state.source._replace(past=attended.past))
        return DecoderStep(output, attended, readout, context, state)

    def _query(self, query: Tensor, state: DecoderState) -> tuple[Attended, Tensor, Tensor]:
        """Attend with the queries (N, H) of one step, grouped by sentence. Returns the result (N, 1, ...), and what the
        context adds to the recurrent layers (N, C) and to the readout (N, P). If only one of both reads the context at
        this step, the other result is of no use."""
        parameters, source = state.parameters, state.source
        assert source is not None
        assert parameters.attention is not None
        sentences = source.memory.sentences
        attended = parameters.attention.step(query.view(sentences, -1, query.shape[1]), source.memory, source.past)
        if len(query) > sentences:  # several hypotheses share a row of the memory
            context, weights = (part.flatten(0, 1)[:, None] for part in (attended.context, attended.weights))
            attended = Attended(context, weights, attended.past)
        context, bias = attended.context.squeeze(1), parameters.context_bias
        if not parameters.multiplied_memory:
            context = linear(context, parameters.context, bias)
        elif bias is not None:
            context = context + bias
        C = parameters.context_width
        if C in (0, context.shape[1]):  # only one of both reads the context: the gradient of a split would cost kernels
            return attended, context, context
        into_layers, into_readout = torch.split(context, [C, context.shape[1] - C], dim=1)
        return attended, into_layers, into_readout

    def _readouts(self, run: "Run", words: Tensor | None, state: DecoderState) -> Tensor:
        """Return the readouts (B, T, R) that were fed back, or compute the readouts of all steps at once."""
        if run.readouts is not None:
            return run.readouts
        parameters, attended = state.parameters, run.attended
        context = None if attended is None else linear(attended.context, parameters.context_readout)
        return self._read_out(run.outputs, context, words, parameters)

    def _read_out(
        self, output: Tensor, context: Tensor | None, word: Tensor | None, parameters: StepParameters
    ) -> Tensor:
        """Compute readouts with dropout: outputs (..., H), what contexts and words add to them (..., P) -> (..., R)."""
        projected = linear(output, parameters.output, parameters.output_bias)
        for part in (context, word):
            projected = projected if part is None else projected + part
        readout: Tensor = self.dropout(self.readout.activation(projected))
        return readout

    def _predict(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Prediction:
        """Make the prediction from readouts (B, T, R), with what the lexical model adds, and weights (B, T, S). For one
        step of a search, pass (N, R) and (N, S). With a copy gate, the prediction is then grouped by sentence: (B, N /
        B, ...)."""
        readouts = self._add_lexical(readouts, weights, state)
        if self.copy is None or weights is None:
            return Readouts(readouts)
        tokens = state.attended_source().tokens
        assert tokens is not None
        copying: Copying = self.copy(_by_sentence(readouts, len(tokens)), _by_sentence(weights, len(tokens)), tokens)
        return copying

    def _add_lexical(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Tensor:
        """Add the lexical model's result to readouts, if there is one: (B, T, R), weights (B, T, S) -> (B, T, R). For a
        single step, all shapes lack T."""
        lexical = state.parameters.lexical
        if lexical is None or weights is None:
            return readouts
        words = state.attended_source().words
        assert words is not None
        # `lexical` takes weights (B, T, S). In a search step, T is the number of hypotheses of a sentence, N / B.
        added: Tensor = lexical(_by_sentence(weights, len(words)), words)
        dropped: Tensor = self.dropout(added.view(readouts.shape))
        return readouts + dropped


class DecoderStep(NamedTuple):
    """The result of one step."""

    output: Tensor  # (N, H) of the top layer
    attended: Attended | None  # weights and context of this step alone, T = 1
    readout: Tensor | None  # (N, R) with input feeding; None otherwise, where readouts are computed after the loop
    context: Tensor | None  # (N, P) what the context of the attention adds to the readout
    state: DecoderState  # state before the next step
    mixture: Mixture | None = None  # prediction of this step, if the next step reads the posterior of this step


class Run(NamedTuple):
    """The result of T steps."""

    outputs: Tensor  # (B, T, H) of the top layer
    attended: Attended | None = None
    readouts: Tensor | None = None  # (B, T, R) with input feeding
    steps: Sequence[DecoderStep] = ()  # the steps, if they were computed one after another


def _by_sentence(rows: Tensor, sentences: int) -> Tensor:
    """Group rows by sentence: (N, D) -> (B, N / B, D). Rows that are grouped already, (B, T, D), stay as they are."""
    return rows.reshape(sentences, -1, rows.shape[-1])
