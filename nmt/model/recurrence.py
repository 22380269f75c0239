"""A recurrent network over whole sequences, on the parameters of torch's nn.RNN, nn.GRU and nn.LSTM.

Shapes: B batch, T positions, I inputs, H hidden, D directions, G gates x H.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from nmt.model.cells import CellState, LayerWeights, Recurrent, layer_weights, step_layer
from nmt.ops.dropout import dropout
from nmt.ops.linear import linear
from nmt.ops.rows import swap_rows
from nmt.ops.shared import loop


def run(
    rnn: Recurrent, inputs: Tensor, lengths: Tensor | None = None, start: CellState | None = None
) -> tuple[Tensor, CellState]:
    """(B, T, I) -> outputs (B, T, D H) and the top layer's last states, D x (B, H).

    `lengths`, int64 (B,) on the CPU, say where sequences end: outputs behind are zero, and the second direction starts
    there; None: all are whole. `start`: the first state of every layer of one direction; None: zeros. On a CPU this is
    a loop whose weight gradients are made after it, elsewhere torch's own.
    """
    return _loop(rnn, inputs, lengths, start) if inputs.device.type == "cpu" else _library(rnn, inputs, lengths, start)


def _loop(rnn: Recurrent, inputs: Tensor, lengths: Tensor | None, start: CellState | None) -> tuple[Tensor, CellState]:
    order = None if lengths is None else _Order(lengths, inputs.shape[1])
    final = CellState((), ())
    for layer in range(rnn.num_layers):
        below = dropout(inputs, rnn.dropout, rnn.training) if layer else inputs
        inputs, final = _run_layer(rnn, layer, below, order, start)
    return inputs, final


class _Order:
    """Where sentences end, and positions from their ends."""

    def __init__(self, lengths: Tensor, T: int) -> None:
        positions = torch.arange(T)[:, None]
        self.valid = (positions < lengths).T[:, :, None]  # (B, T, 1)
        self.last = lengths - 1, torch.arange(len(lengths))
        reverse = torch.where(positions < lengths, lengths - 1 - positions, positions)  # (T, B)
        self.reverse = (reverse * len(lengths) + torch.arange(len(lengths))).flatten()


def _run_layer(
    rnn: Recurrent, layer: int, inputs: Tensor, order: _Order | None, start: CellState | None
) -> tuple[Tensor, CellState]:
    B, T, _ = inputs.shape
    D = 2 if rnn.bidirectional else 1
    by_step = inputs.transpose(0, 1).flatten(0, 1)  # (T B, I)
    if D == 1:
        weights = layer_weights(rnn, layer)
        gates = linear(by_step, weights.weight_ih, weights.bias_ih)
    else:
        assert order is not None
        both = layer_weights(rnn, layer), layer_weights(rnn, layer, "_reverse")
        weights = LayerWeights(*(torch.stack(pair) for pair in zip(*both, strict=True)))
        both_ways = torch.stack([by_step, swap_rows(by_step, order.reverse)])
        gates = linear(both_ways, weights.weight_ih, weights.bias_ih)
    steps = gates.view(*gates.shape[:-2], T, B, -1).unbind(-3)
    if start is None:
        nothing = gates.new_zeros(*gates.shape[:-2], B, rnn.hidden_size)
        state = nothing, nothing if isinstance(rnn, nn.LSTM) else None
    else:
        state = start.of(layer)
    states = []
    with loop():
        for step in steps:
            state = step_layer(rnn, weights, step, *state)
            states.append(state)
    hidden = torch.stack([h for h, _ in states], dim=-3)  # (T, B, H) or (D, T, B, H)
    memory = None if state[1] is None else torch.stack([c for _, c in states if c is not None], dim=-3)
    if D == 1:
        outputs = hidden.transpose(0, 1)
    else:
        assert order is not None
        backward = swap_rows(hidden[1].flatten(0, 1), order.reverse).view(T, B, -1)
        outputs = torch.cat([hidden[0], backward], dim=-1).transpose(0, 1)
    if order is None:
        return outputs, CellState((hidden[-1],), () if memory is None else (memory[-1],))
    outputs = (outputs * order.valid).contiguous()
    return outputs, CellState(*(() if part is None else _last(part, order) for part in (hidden, memory)))


def _last(states: Tensor, order: _Order) -> tuple[Tensor, ...]:
    """(T, B, H) or (D, T, B, H) -> D x (B, H) at the end of each sentence."""
    t, b = order.last
    return states[:, t, b].unbind(0) if states.dim() == 4 else (states[t, b],)  # noqa: PLR2004


def _library(
    rnn: Recurrent, inputs: Tensor, lengths: Tensor | None, start: CellState | None
) -> tuple[Tensor, CellState]:
    packed = (
        inputs if lengths is None else pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    )
    given = None
    if start is not None:
        hidden, *memory = (torch.stack(part).to(inputs.dtype) for part in start if part)
        given = (hidden, *memory) if memory else hidden
    outputs, final = rnn(packed, given)
    if lengths is not None:
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])
    D = 2 if rnn.bidirectional else 1
    parts = [part[-D:].unbind(0) for part in (final if isinstance(final, tuple) else (final,))]
    return outputs, CellState(parts[0], parts[1] if len(parts) > 1 else ())
