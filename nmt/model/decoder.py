"""The recurrent decoder: when it attends, what it feeds back, and the two ways through it.

Shapes: B batch, S source positions, T target positions, E embedding, H hidden, M memory, R readout, G gates x H.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.attention.memory import Attended, Choice, join_steps
from nmt.attention.steering import Detail
from nmt.model.cells import CellState, Recurrent, State, drop_inputs, input_gates, norm_gates, step_layer, zone_out
from nmt.model.copying import CopyGate, Copying
from nmt.model.latent.mixture import Inferred, Mixture
from nmt.model.readout import LexicalModel, Readout
from nmt.model.recurrence import run_rnn
from nmt.model.regularisation import PLAIN, RecurrentOptions, Regularisation
from nmt.model.state import BatchWeights, DecoderState, Weights
from nmt.model.upper import UpperLayers
from nmt.ops.dropout import Dropout, masked
from nmt.ops.shared import loop


class Decoded(NamedTuple):
    readouts: Tensor  # (B, T, R)
    weights: Tensor | None = None  # (B, T, S), row t used to produce token t
    log_weights: Tensor | None = None  # (B, T, S), if the attention returns them
    choice: Choice | None = None  # of sampled positions in training
    mixture: Mixture | None = None  # with a latent position: predictions come from it instead of `readouts`
    inferred: Inferred | None = None  # by an inference network in training
    copying: Copying | None = None  # with a copy gate: predictions come from it instead of `readouts`
    detail: Detail | None = None  # of the attention, if its memory asks for it

    @property
    def predictions(self) -> Tensor | Mixture | Copying:
        """What the output layer reads."""
        return next((each for each in (self.copying, self.mixture) if each is not None), self.readouts)


Observe = Callable[[int, DecoderState], DecoderState]
"""A step's number and the state before it -> the state in which the previous token is known."""


class Decoder(nn.Module):
    """A recurrent network over [previous word; context or fixed vector; previous readout], and a readout.

    attend "before": the query is the previous state, and the context enters the recurrent step (Bahdanau et al.
    2015, A.2.2); "after": the query is the current state (Luong et al. 2015, 3); "between": the step is two, the
    query is the state after the first, over the word, and the context enters the second, `conditional` (Sennrich et
    al. 2017, the conditional GRU of Nematus); its transitions and further layers follow. Zoneout keeps the state
    from before both steps. "first_layer": the query is the first layer's current state, which depends on the words
    alone, and the context enters the layers above, `upper` (Wu et al. 2016, 3; here with the current state).
    """

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
        options: RecurrentOptions = PLAIN,
    ) -> None:
        """conditional: one layer over the context, for "between" only; lexical: its result is added to the readout, but
        not fed back; upper: the layers above the one of `rnn`, for "first_layer" only; copy: what it makes of a
        prediction, see CopyGate."""
        super().__init__()
        assert (attend == "between") == (conditional is not None)
        assert (attend == "first_layer") == (upper is not None)
        self.rnn, self.attention, self.readout, self.conditional = rnn, attention, readout, conditional
        self.lexical, self.upper, self.copy = lexical, upper, copy
        self.attend, self.input_feeding = attend, input_feeding
        # In a conditional decoder, the lowest layer's transitions come after the second step.
        self.regularisation = Regularisation(rnn, options, lowest=0 if conditional is None else 1)
        self.conditional_regularisation = None if conditional is None else Regularisation(conditional, options)
        self.dropout = Dropout(options.dropout, options.variational)
        # Does the attention or readout of a step enter the next step?
        self.stepped = input_feeding or (attention is not None and attend in ("before", "between"))

    def forward(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Teacher forcing: (B, T, E) embeddings of <s> y_1 ... y_{T-1} -> Decoded with all T steps."""
        decoded = self.forward_stepped(embedded, state) if self.stepped else self.forward_fused(embedded, state)
        readouts = self._add_lexical(decoded.readouts, decoded.weights, state)
        if self.copy is not None:
            decoded = decoded._replace(copying=self._copied(self.copy, readouts, decoded.weights, state))
        return decoded._replace(readouts=readouts)

    def forward_fused(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """One call of each recurrent network for the whole target, one product for the attention of all steps."""
        return self._fused(embedded, state)[0]

    def _fused(self, embedded: Tensor, state: DecoderState) -> tuple[Decoded, Tensor]:
        """Decoded, and the top layer's outputs (B, T, H)."""
        own, cell, layers = self.rnn.num_layers, state.cell, state.weights.layers
        hidden, final = self._run_words(embedded, state)
        attended = None
        if self.attention is not None:
            attended = self.attention.sequence(hidden, *state.attention())
        if self.upper is not None and attended is not None:
            upper = cell.layers(own, len(layers))
            hidden, _ = self.upper(hidden, final, layers[own:], start=upper, context=attended.context)
        return self._decoded(hidden, attended, embedded, state), hidden

    def _run_words(self, embedded: Tensor, state: DecoderState) -> tuple[Tensor, CellState]:
        """The recurrent network `rnn`, which reads words alone -> outputs (B, T, H) and last states."""
        inputs = embedded
        if state.fixed is not None:
            inputs = torch.cat([embedded, state.fixed[:, None].expand(-1, embedded.shape[1], -1)], dim=-1)
        own = self.rnn.num_layers
        start, layers = state.cell.layers(0, own), state.weights.layers[:own]
        return run_rnn(self.rnn, inputs, None, start, self.regularisation, layers)

    def forward_stepped(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Step by step; everything that does not depend on the previous step is computed before or after the loop."""
        return self._joined(self._run_steps(embedded, state), embedded, state)

    def _run_steps(self, embedded: Tensor, state: DecoderState, observe: Observe | None = None) -> "list[DecoderStep]":
        gates = state.weights.word_gates(embedded, state.fixed)
        steps: list[DecoderStep] = []
        with loop():
            for t, (gates_t, word) in enumerate(zip(gates.unbind(1), embedded.unbind(1), strict=True)):
                state = state if observe is None else observe(t, state)
                steps.append(self._step(gates_t, word, state))
                state = steps[-1].state
        return steps

    def _joined(self, steps: "list[DecoderStep]", embedded: Tensor, state: DecoderState) -> Decoded:
        attended_steps = [step.attended for step in steps if step.attended is not None]
        attended = join_steps(attended_steps) if attended_steps else None
        fed_back = [step.readout for step in steps if step.readout is not None]
        if fed_back:
            return _with_weights(torch.stack(fed_back, dim=1), attended)
        return self._decoded(self._outputs(steps), attended, embedded, state)

    def _outputs(self, steps: "list[DecoderStep]") -> Tensor:
        """(B, T, H)."""
        return torch.stack([self._output(step.state.cell) for step in steps], dim=1)

    def step(self, word: Tensor, state: DecoderState) -> tuple[Tensor | Mixture | Copying, Tensor | None, DecoderState]:
        """(B, E) embedding of the previous token, or what else the state's weights take for it -> readout (B, R), or
        with a copy gate a Copying grouped by sentence; weights (B, S) or None; next state."""
        step = self._step(state.weights.word_gates(word, state.fixed), word, state)
        readout = step.readout
        if readout is None:
            readout = self._read_out(self._output(step.state.cell), step.context, word, state)
        weights = None if step.attended is None else step.attended.weights[:, 0]
        readout = self._add_lexical(readout, weights, state)
        copied = None if self.copy is None else self._copied(self.copy, readout, weights, state)
        return readout if copied is None else copied, weights, step.state

    def weights(self, rows: int, word_dim: int, fixed_dim: int) -> BatchWeights:
        """The weights for a batch of `rows` sentences, for all steps; fixed_dim = M with a fixed vector, else 0."""
        layers = self.regularisation.prepare(self.rnn, rows)
        layers += [] if self.upper is None else self.upper.prepare(rows)
        widths = [word_dim, fixed_dim, self.rnn.input_size - word_dim - fixed_dim]
        word, fixed, fed = (part.contiguous() for part in torch.split(layers[0].weight_ih, widths, dim=1))
        conditional = None
        if self.conditional is not None and self.conditional_regularisation is not None:
            (conditional,) = self.conditional_regularisation.prepare(self.conditional, rows)
        readout_mask = self.dropout.sentence_mask(layers[0].weight_hh, rows, self.readout.dim)
        return BatchWeights(layers, word, fixed, fed, conditional, self.readout, readout_mask=readout_mask)

    def _step(self, gates: Tensor, word: Tensor, state: DecoderState) -> "DecoderStep":
        attended, upper_context, weights = None, None, state.weights
        if self.attend == "before":
            attended = self._attend(self._output(state.cell)[:, None], state)
        fed = weights.fed_gates(None if attended is None else attended.context.squeeze(1), state.feed)
        gates = gates if fed is None else gates + fed
        lowest = weights.layers[0]
        first = step_layer(self.rnn, lowest, norm_gates(self.rnn, lowest, gates), *state.cell.of(0))
        if self.attend == "between":
            attended = self._attend(first[0][:, None], state)
            first = self._condition(first, attended, weights)
        first = zone_out(self.rnn, lowest, first, state.cell.of(0))
        if self.attend == "first_layer":
            attended = self._attend(first[0][:, None], state)
            upper_context = None if attended is None else weights.upper_input(attended.context.squeeze(1))
        cell = self._upper_layers(first, state.cell, weights, upper_context)
        output = self._output(cell)
        if self.attend == "after":
            attended = self._attend(output[:, None], state)
        context = state.fixed if attended is None else attended.context.squeeze(1)
        readout = self._read_out(output, context, word, state) if self.input_feeding else None
        past = state.past if attended is None else attended.past
        return DecoderStep(attended, context, readout, state._replace(cell=cell, feed=readout, past=past))

    def _condition(self, first: State, attended: Attended | None, weights: Weights) -> State:
        """The second half of a conditional step: from the state after the word to the state after the context."""
        assert self.conditional is not None
        assert weights.conditional is not None
        assert attended is not None
        gates = weights.conditional_gates(self.conditional, attended.context.squeeze(1))
        return step_layer(self.conditional, weights.conditional, gates, *first)

    def _upper_layers(self, first: State, state: CellState, weights: Weights, context: Tensor | None) -> CellState:
        """The step of the layers above the first, given the first layer's new state. `context`, (B, M) or None,
        is concatenated to the input of each of them."""
        steps, output = [first], first[0]
        for layer, upper in enumerate(weights.layers[1:], 1):
            inputs = output if context is None else torch.cat([output, context], dim=1)
            gates = input_gates(self.rnn, upper, drop_inputs(self.rnn, upper, inputs))
            new = step_layer(self.rnn, upper, gates, *state.of(layer))
            steps.append(zone_out(self.rnn, upper, new, state.of(layer)))
            output = output + steps[-1][0] if upper.residual else steps[-1][0]
        return CellState(
            tuple(hidden for hidden, _ in steps), tuple(memory for _, memory in steps if memory is not None)
        )

    def _output(self, cell: CellState) -> Tensor:
        """The top layer's output (B, H): its state, added to the output of the layer below in a residual connection."""
        residual = self.regularisation.options.residual
        return sum(cell.hidden[residual - 1 :], cell.hidden[residual - 2]) if residual else cell.hidden[-1]

    def _decoded(self, outputs: Tensor, attended: Attended | None, embedded: Tensor, state: DecoderState) -> Decoded:
        """Reads out all steps at once: outputs (B, T, H) of the top layer, embeddings (B, T, E)."""
        context = None if attended is None else attended.context
        if state.fixed is not None:
            context = state.fixed[:, None].expand(-1, outputs.shape[1], -1)
        return _with_weights(self._read_out(outputs, context, embedded, state), attended)

    def _read_out(self, output: Tensor, context: Tensor | None, word: Tensor, state: DecoderState) -> Tensor:
        """(B, T, H), (B, T, M) or None, (B, T, E), or without T -> (B, T, R) or (B, R), after dropout."""
        return self._drop(state.weights.read_out(output, context, word), state)

    def _add_lexical(self, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Tensor:
        """(B, T, R), (B, T, S) or None, or without T -> (B, T, R) or (B, R), plus the lexical model's result."""
        if self.lexical is None:
            return readouts
        assert weights is not None
        assert state.words is not None
        by_sentence = weights.view(
            state.words.shape[0], -1, weights.shape[-1]
        )  # the attention gets the hypotheses of a sentence as if they were steps
        added: Tensor = self.lexical(by_sentence, state.words)
        return readouts + self._drop(added.view(readouts.shape), state)

    def _copied(self, gate: CopyGate, readouts: Tensor, weights: Tensor | None, state: DecoderState) -> Copying:
        """(B, T, R), (B, T, S), or without T and grouped by sentence -> Copying."""
        assert weights is not None
        assert state.source is not None
        readouts, weights = (part.reshape(len(state.source), -1, part.shape[-1]) for part in (readouts, weights))
        copying: Copying = gate(readouts, weights, state.source)
        return copying

    def _drop(self, readout: Tensor, state: DecoderState) -> Tensor:
        mask = state.weights.readout_mask
        dropped: Tensor = self.dropout(readout) if mask is None else masked(readout, mask)
        return dropped

    def _attend(self, query: Tensor, state: DecoderState) -> Attended | None:
        """Queries (N, 1, H) of one step, grouped by sentence -> Attended (N, 1, ...), or None without attention."""
        if self.attention is None:
            return None
        memory, past = state.attention()
        hypotheses = query.shape[0] // memory.sentences  # per sentence; more than one if they share its memory
        attended = self.attention.step(query.view(memory.sentences, hypotheses, -1), memory, past)
        if hypotheses == 1:
            return attended
        context, weights = (part.flatten(0, 1)[:, None] for part in (attended.context, attended.weights))
        return Attended(context, weights, attended.past)


class DecoderStep(NamedTuple):
    attended: Attended | None  # T = 1
    context: Tensor | None  # (B, M) of the attention, or the fixed vector
    readout: Tensor | None  # (B, R), if it is fed back; else computed for all steps at once
    state: DecoderState  # the next one
    mixture: Mixture | None = None  # T = 1, if the next step reads its posterior


def _with_weights(readouts: Tensor, attended: Attended | None) -> Decoded:
    if attended is None:
        return Decoded(readouts)
    weights, log_weights, choice, detail = attended.weights, attended.log_weights, attended.choice, attended.detail
    return Decoded(readouts, weights, log_weights, choice, detail=detail)
