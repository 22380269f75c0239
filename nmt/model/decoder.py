"""The recurrent decoder: when it attends, what it feeds back, and the two ways through it.

Shapes: B batch, S source positions, T target positions, E embedding, H hidden, M memory, R readout, G gates x H.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attention
from nmt.attention.heads import MultiHeadAttention
from nmt.attention.memory import Attended, Choice, Memory, Past
from nmt.model.cells import CellState, LayerWeights, Recurrent, layer_weights, step_layer
from nmt.model.readout import Readout
from nmt.model.recurrence import run
from nmt.ops.dropout import Dropout, dropout
from nmt.ops.linear import linear
from nmt.ops.shared import loop


class Weights(NamedTuple):
    """Recurrent parameters in the precision of the computation."""

    layers: list[LayerWeights]
    word: Tensor  # (G, E), the columns of the first layer's weight_ih for the word,
    fixed: Tensor  # (G, M or 0), for a fixed vector,
    fed: Tensor  # (G, ...), and for what a step computes: context, previous readout
    conditional: LayerWeights | None


class DecoderState(NamedTuple):
    """All that one step hands to the next, and what all steps of a sentence share."""

    cell: CellState
    feed: Tensor | None  # (B, R) the previous readout, with input feeding
    past: Past | None  # of the attention, if there is one
    memory: Memory | None  # what the attention reads, if there is one
    fixed: Tensor | None  # (B, M) the context of a decoder without attention that sees it at every step
    weights: Weights  # the parameters of all steps
    folds: bool  # may hypotheses of one sentence share its row of past and memory?

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, which may repeat."""
        return self._own_rows(index)._shared_rows(index)

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses, in rows grouped by sentence, equally many for each.

        `sentences` are those kept (None: all); their past and memory are stored once where the attention allows it.
        """
        state = self._own_rows(index)
        if not self.folds:
            return state._shared_rows(index)
        return state if sentences is None else state._shared_rows(sentences)

    def _own_rows(self, index: Tensor) -> Self:
        return self._replace(
            cell=self.cell.select(index),
            feed=None if self.feed is None else self.feed.index_select(0, index),
            fixed=None if self.fixed is None else self.fixed.index_select(0, index),
        )

    def _shared_rows(self, index: Tensor) -> Self:
        return self._replace(
            past=None if self.past is None else self.past.select(index),
            memory=None if self.memory is None else self.memory.select(index),
        )


class Decoded(NamedTuple):
    readouts: Tensor  # (B, T, R)
    weights: Tensor | None = None  # (B, T, S), row t used to produce token t
    choice: Choice | None = None  # of hard attention in training


class Decoder(nn.Module):
    """A recurrent network over [previous word; context or fixed vector; previous readout], and a readout.

    attend "before": the query is the previous state, and the context enters the recurrent step (Bahdanau et al.
    2015, A.2.2); "after": the query is the current state (Luong et al. 2015, 3); "between": the step is two, the
    query is the state after the first, over the word, and the context enters the second, `conditional` (Sennrich et
    al. 2017, the conditional GRU of Nematus); further layers follow it.
    """

    def __init__(
        self,
        rnn: Recurrent,
        attention: Attention | MultiHeadAttention | None,
        readout: Readout,
        conditional: Recurrent | None = None,
        *,
        attend: Literal["before", "between", "after"],
        input_feeding: bool,
        dropout: float,
    ) -> None:
        """conditional: one layer over the context, for "between" alone."""
        super().__init__()
        assert (attend == "between") == (conditional is not None)
        self.rnn, self.attention, self.readout, self.conditional = rnn, attention, readout, conditional
        self.attend, self.input_feeding = attend, input_feeding
        self.dropout = Dropout(dropout)
        # Does anything that a step computes from its attention or readout enter the next step?
        self.stepped = input_feeding or (attention is not None and attend != "after")

    def forward(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Teacher forcing: (B, T, E) embeddings of <s> y_1 ... y_{T-1} -> readouts and weights of all T steps."""
        return self.forward_stepped(embedded, state) if self.stepped else self.forward_fused(embedded, state)

    def forward_fused(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """The whole target through one call of the recurrent network, attention for all steps in one product."""
        inputs = embedded
        if state.fixed is not None:
            inputs = torch.cat([embedded, state.fixed[:, None].expand(-1, embedded.shape[1], -1)], dim=-1)
        hidden, _ = run(self.rnn, inputs, None, state.cell)
        attended = self._attend(hidden, state)
        context = None if attended is None else attended.context
        if state.fixed is not None:
            context = state.fixed[:, None].expand(-1, hidden.shape[1], -1)
        readouts = self.dropout(self.readout(hidden, context, embedded))
        return Decoded(readouts) if attended is None else Decoded(readouts, attended.weights, attended.choice)

    def forward_stepped(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Step by step, with all that does not depend on the previous step done before or after the loop."""
        gates = self._word_gates(embedded, state)
        steps: list[_Step] = []
        with loop():
            for gates_t, word in zip(gates.unbind(1), embedded.unbind(1), strict=True):
                steps.append(self._step(gates_t, word, state))
                state = steps[-1].state
        readouts = _stack([step.readout for step in steps])
        if readouts is None:
            hidden = torch.stack([step.state.cell.hidden[-1] for step in steps], dim=1)
            readouts = self.dropout(self.readout(hidden, _stack([step.context for step in steps]), embedded))
        choices = [step.choice for step in steps if step.choice is not None]
        choice = Choice(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True))) if choices else None
        return Decoded(readouts, _stack([step.weights for step in steps]), choice)

    def step(self, word: Tensor, state: DecoderState) -> tuple[Tensor, Tensor | None, DecoderState]:
        """(B, E) embedding of the previous token -> readout (B, R), weights (B, S) or None, next state."""
        step = self._step(self._word_gates(word, state), word, state)
        readout = step.readout
        if readout is None:
            readout = self.dropout(self.readout(step.state.cell.hidden[-1], step.context, word))
        return readout, step.weights, step.state

    def weights(self, word_dim: int, fixed_dim: int) -> Weights:
        """The recurrent parameters, taken apart once for all steps; fixed_dim = M with a fixed vector, else 0."""
        layers = [layer_weights(self.rnn, layer) for layer in range(self.rnn.num_layers)]
        widths = [word_dim, fixed_dim, self.rnn.input_size - word_dim - fixed_dim]
        word, fixed, fed = (part.contiguous() for part in torch.split(layers[0].weight_ih, widths, dim=1))
        conditional = None if self.conditional is None else layer_weights(self.conditional, 0)
        return Weights(layers, word, fixed, fed, conditional)

    def _word_gates(self, embedded: Tensor, state: DecoderState) -> Tensor:
        """(B, T, E) or (B, E) -> (B, T, G) or (B, G): the share of words and fixed vector in the first layer."""
        gates = linear(embedded, state.weights.word, state.weights.layers[0].bias_ih)
        if state.fixed is not None:
            fixed = linear(state.fixed, state.weights.fixed)
            gates = gates + (fixed[:, None] if embedded.dim() == 3 else fixed)  # noqa: PLR2004
        return gates

    def _step(self, gates: Tensor, word: Tensor, state: DecoderState) -> "_Step":
        attended, weights = None, state.weights
        fed = [] if state.feed is None else [state.feed]
        if self.attend == "before":
            attended = self._attend(state.cell.hidden[-1][:, None], state)
            fed = fed if attended is None else [attended.context[:, 0], *fed]
        if fed:
            gates = gates + linear(torch.cat(fed, dim=1), weights.fed)
        first = step_layer(self.rnn, weights.layers[0], gates, *state.cell.of(0))
        if self.attend == "between":
            attended = self._attend(first[0][:, None], state)
            first = self._condition(first, attended, weights)
        cell = self._upper_layers(first, state.cell, weights)
        if self.attend == "after":
            attended = self._attend(cell.hidden[-1][:, None], state)
        context = state.fixed if attended is None else attended.context[:, 0]
        readout = self.dropout(self.readout(cell.hidden[-1], context, word)) if self.input_feeding else None
        state = state._replace(cell=cell, feed=readout)
        if attended is None:
            return _Step(context, None, None, readout, state)
        return _Step(context, attended.weights[:, 0], attended.choice, readout, state._replace(past=attended.past))

    def _condition(
        self, first: tuple[Tensor, Tensor | None], attended: Attended | None, weights: Weights
    ) -> tuple[Tensor, Tensor | None]:
        """The second half of a conditional step: from the state after the word to the state after the context."""
        assert self.conditional is not None
        assert weights.conditional is not None
        assert attended is not None
        gates = linear(attended.context[:, 0], weights.conditional.weight_ih, weights.conditional.bias_ih)
        return step_layer(self.conditional, weights.conditional, gates, *first)

    def _upper_layers(self, first: tuple[Tensor, Tensor | None], state: CellState, weights: Weights) -> CellState:
        """The recurrent step of the layers above the first, whose new hidden state and memory are given."""
        steps = [first]
        for layer, upper in enumerate(weights.layers[1:], 1):
            below = dropout(steps[-1][0], self.rnn.dropout, self.training)
            gates = linear(below, upper.weight_ih, upper.bias_ih)
            steps.append(step_layer(self.rnn, upper, gates, *state.of(layer)))
        return CellState(
            tuple(hidden for hidden, _ in steps), tuple(memory for _, memory in steps if memory is not None)
        )

    def _attend(self, query: Tensor, state: DecoderState) -> Attended | None:
        """(B, T, H) -> what the attention returns, if there is one."""
        if self.attention is None:
            return None
        assert state.memory is not None
        assert state.past is not None
        sentences = state.memory.sentences
        if len(query) == sentences:
            attended: Attended = self.attention(query, state.memory, state.past)
            return attended
        # Hypotheses of one sentence side by side: to the attention they are steps, T.
        attended = self.attention(query.view(sentences, -1, query.shape[-1]), state.memory, state.past)
        context, weights = (part.flatten(0, 1)[:, None] for part in (attended.context, attended.weights))
        return Attended(context, weights, state.past)


class _Step(NamedTuple):
    context: Tensor | None  # (B, M)
    weights: Tensor | None  # (B, S)
    choice: Choice | None  # of this step alone, T = 1
    readout: Tensor | None  # (B, R), only where it is fed back; else made for all steps at once
    state: DecoderState


def _stack(parts: list[Tensor | None]) -> Tensor | None:
    """T x (B, ...) -> (B, T, ...)."""
    present = [part for part in parts if part is not None]
    return torch.stack(present, dim=1) if present else None
