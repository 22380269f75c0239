"""The recurrent decoder: when it attends, what it feeds back, and the two ways through it.

Shapes: B batch, S source positions, T target positions, E embedding, H hidden, M memory, R readout, G gates x H.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.attention.attention import Attention
from nmt.attention.memory import Memory, Past
from nmt.model.cells import CellState, LayerWeights, Recurrent, layer_weights, step_layer
from nmt.model.readout import Readout


class DecoderState(NamedTuple):
    """All that one step hands to the next, and what all steps of a sentence share."""

    cell: CellState
    feed: Tensor | None  # (B, R) the previous readout, with input feeding
    past: Past | None  # of the attention, if there is one
    memory: Memory | None  # what the attention reads, if there is one
    fixed: Tensor | None  # (B, M) the context of a decoder without attention that sees it at every step

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, for beam search."""
        return self._replace(
            cell=self.cell.select(index),
            feed=None if self.feed is None else self.feed.index_select(0, index),
            past=None if self.past is None else self.past.select(index),
            memory=None if self.memory is None else self.memory.select(index),
            fixed=None if self.fixed is None else self.fixed.index_select(0, index),
        )


class Decoded(NamedTuple):
    readouts: Tensor  # (B, T, R)
    weights: Tensor | None  # (B, T, S), row t used to produce token t


class Decoder(nn.Module):
    """A recurrent network over [previous word; context or fixed vector; previous readout], and a readout.

    attend "before": the query is the previous state, and the context enters the recurrent step (Bahdanau et al.
    2015, A.2.2); "after": the query is the current state (Luong et al. 2015, 3).
    """

    def __init__(
        self,
        rnn: Recurrent,
        attention: Attention | None,
        readout: Readout,
        *,
        attend: Literal["before", "after"],
        input_feeding: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.rnn, self.attention, self.readout = rnn, attention, readout
        self.attend, self.input_feeding = attend, input_feeding
        self.dropout = nn.Dropout(dropout)
        # Does anything that a step computes from its attention or readout enter the next recurrent step?
        self.stepped = input_feeding or (attention is not None and attend == "before")

    def forward(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Teacher forcing: (B, T, E) embeddings of <s> y_1 ... y_{T-1} -> readouts and weights of all T steps."""
        return self.forward_stepped(embedded, state) if self.stepped else self.forward_fused(embedded, state)

    def forward_fused(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """The whole target through one call of the recurrent network, attention for all steps in one product."""
        inputs = embedded
        if state.fixed is not None:
            inputs = torch.cat([embedded, state.fixed[:, None].expand(-1, embedded.shape[1], -1)], dim=-1)
        start = torch.stack(state.cell.hidden).to(inputs.dtype)
        if state.cell.memory:
            hidden, _ = self.rnn(inputs, (start, torch.stack(state.cell.memory).to(inputs.dtype)))
        else:
            hidden, _ = self.rnn(inputs, start)
        context, weights = None, None
        if self.attention is not None:
            assert state.memory is not None
            assert state.past is not None
            context, weights = self.attention(hidden, state.memory, state.past)
        if state.fixed is not None:
            context = state.fixed[:, None].expand(-1, hidden.shape[1], -1)
        return Decoded(self.dropout(self.readout(hidden, context, embedded)), weights)

    def forward_stepped(self, embedded: Tensor, state: DecoderState) -> Decoded:
        """Step by step, with all that does not depend on the previous step done before or after the loop."""
        layers = self._layers()
        gates = self._word_gates(embedded, state, layers[0])
        steps: list[_Step] = []
        for gates_t, word in zip(gates.unbind(1), embedded.unbind(1), strict=True):
            steps.append(self._step(gates_t, word, state, layers))
            state = steps[-1].state
        weights = _stack([step.weights for step in steps])
        readouts = _stack([step.readout for step in steps])
        if readouts is None:
            hidden = torch.stack([step.state.cell.hidden[-1] for step in steps], dim=1)
            readouts = self.dropout(self.readout(hidden, _stack([step.context for step in steps]), embedded))
        return Decoded(readouts, weights)

    def step(self, word: Tensor, state: DecoderState) -> tuple[Tensor, Tensor | None, DecoderState]:
        """(B, E) embedding of the previous token -> readout (B, R), weights (B, S) or None, next state."""
        layers = self._layers()
        step = self._step(self._word_gates(word, state, layers[0]), word, state, layers)
        readout = step.readout
        if readout is None:
            readout = self.dropout(self.readout(step.state.cell.hidden[-1], step.context, word))
        return readout, step.weights, step.state

    def _layers(self) -> list[LayerWeights]:
        return [layer_weights(self.rnn, layer) for layer in range(self.rnn.num_layers)]

    def _word_gates(self, embedded: Tensor, state: DecoderState, first: LayerWeights) -> Tensor:
        """(B, T, E) or (B, E) -> (B, T, G) or (B, G): the share of words and fixed vector in the first layer."""
        E = embedded.shape[-1]
        gates = F.linear(embedded, first.weight_ih[:, :E], first.bias_ih)
        if state.fixed is not None:
            fixed = F.linear(state.fixed, first.weight_ih[:, E : E + state.fixed.shape[1]])
            gates = gates + (fixed[:, None] if embedded.dim() == 3 else fixed)  # noqa: PLR2004
        return gates

    def _step(self, gates: Tensor, word: Tensor, state: DecoderState, layers: list[LayerWeights]) -> "_Step":
        context, weights, past = None, None, state.past
        fed = [] if state.feed is None else [state.feed]
        if self.attend == "before":
            context, weights, past = self._attend_once(state.cell.hidden[-1], state)
            fed = fed if context is None else [context, *fed]
        if fed:
            width = sum(part.shape[1] for part in fed)
            gates = gates + F.linear(torch.cat(fed, dim=1), layers[0].weight_ih[:, -width:])
        cell = self._recur(gates, state.cell, layers)
        if self.attend == "after":
            context, weights, past = self._attend_once(cell.hidden[-1], state)
        if state.fixed is not None:
            context = state.fixed
        readout = self.dropout(self.readout(cell.hidden[-1], context, word)) if self.input_feeding else None
        feed = readout if self.input_feeding else None
        return _Step(context, weights, readout, state._replace(cell=cell, feed=feed, past=past))

    def _recur(self, gates: Tensor, state: CellState, layers: list[LayerWeights]) -> CellState:
        """The recurrent step of all layers, from the first layer's gates (B, G)."""
        hidden: list[Tensor] = []
        memory: list[Tensor] = []
        for layer, weights in enumerate(layers):
            if layer:
                below = F.dropout(hidden[-1], self.rnn.dropout, self.training)
                gates = F.linear(below, weights.weight_ih, weights.bias_ih)
            new_hidden, new_memory = step_layer(self.rnn, weights, gates, state, layer)
            hidden.append(new_hidden)
            if new_memory is not None:
                memory.append(new_memory)
        return CellState(tuple(hidden), tuple(memory))

    def _attend_once(self, query: Tensor, state: DecoderState) -> tuple[Tensor | None, Tensor | None, Past | None]:
        """(B, H) -> context (B, M), weights (B, S) and the past after this step; nothing without attention."""
        if self.attention is None:
            return None, None, None
        assert state.memory is not None
        assert state.past is not None
        context, weights = self.attention(query[:, None], state.memory, state.past)
        return context[:, 0], weights[:, 0], state.past.after(weights[:, 0])


class _Step(NamedTuple):
    context: Tensor | None  # (B, M)
    weights: Tensor | None  # (B, S)
    readout: Tensor | None  # (B, R), only where it is fed back; else made for all steps at once
    state: DecoderState


def _stack(parts: list[Tensor | None]) -> Tensor | None:
    """T x (B, ...) -> (B, T, ...)."""
    present = [part for part in parts if part is not None]
    return torch.stack(present, dim=1) if present else None
