"""A recurrent network over whole sequences, on the parameters of torch's nn.RNN, nn.GRU and nn.LSTM.

Shapes: B batch, T positions, I inputs, H hidden, D directions, G gates x H.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from nmt.model.cells import (
    LayerState,
    LayerWeights,
    Recurrent,
    RecurrentState,
    drop_inputs,
    input_gates,
    layer_weights,
    step_layer,
    zone_out,
)
from nmt.model.regularisation import Regularisation
from nmt.ops.rows import swap_rows
from nmt.ops.shared import loop


def run_rnn(
    rnn: Recurrent,
    inputs: Tensor,
    lengths: Tensor | None = None,
    start: RecurrentState | None = None,
    regularisation: Regularisation | None = None,
    layers: Sequence[LayerWeights] | None = None,
) -> tuple[Tensor, RecurrentState]:
    """(B, T, I) -> outputs (B, T, D H) and the top layer's last states, D x (B, H); with residual connections,
    its last outputs instead of its hidden states.

    lengths: int64 (B,), the sentences' lengths: outputs beyond them are zero, and the backward direction
    starts there; None: all have T positions. start: initial states of one direction; None: zeros. layers: the result of
    `regularisation.prepare`; None: prepared here. On a CPU, with lengths on a GPU, and where torch's own
    call does not support the regularisation, this is a loop with deferred weight gradients; elsewhere torch's own call.
    """
    packs = lengths is None or lengths.device.type == "cpu"
    if inputs.device.type != "cpu" and packs and not (regularisation and regularisation.needs_loop(rnn)):
        return _run_torch(rnn, inputs, lengths, start)
    if layers is None and regularisation is not None:
        layers = regularisation.prepare(rnn, inputs.shape[0])
    return _loop(rnn, inputs, lengths, start, layers)


def _loop(
    rnn: Recurrent,
    inputs: Tensor,
    lengths: Tensor | None,
    start: RecurrentState | None,
    layers: Sequence[LayerWeights] | None = None,
) -> tuple[Tensor, RecurrentState]:
    layers = layers or [layer_weights(rnn, layer) for layer in range(rnn.num_layers)]
    order = None if lengths is None else _Order(lengths, inputs)
    final = RecurrentState((), ())
    for layer, weights in enumerate(layers):
        below = drop_inputs(rnn, weights, inputs) if layer else inputs
        outputs, last = _run_layer(rnn, weights, below, order, None if start is None else start.of(layer))
        if weights.residual:
            outputs = inputs + outputs
            last = last._replace(hidden=tuple(map(torch.add, final.hidden, last.hidden)))
        inputs, final = outputs, last
    return inputs, final


class _Order:
    """Where sentences end, and the order of positions counted from their ends."""

    def __init__(self, lengths: Tensor, inputs: Tensor) -> None:
        B, T, device = *inputs.shape[:2], inputs.device
        lengths = lengths.to(device, non_blocking=True)
        positions, rows = torch.arange(T, device=device)[:, None], torch.arange(B, device=device)
        self.valid = (positions < lengths).T[:, :, None]  # (B, T, 1)
        self.last = lengths - 1, rows
        reverse = torch.where(positions < lengths, lengths - 1 - positions, positions)  # (T, B)
        self.reverse = (reverse * B + rows).flatten()


def _run_layer(
    rnn: Recurrent, weights: LayerWeights, inputs: Tensor, order: _Order | None, start: LayerState | None
) -> tuple[Tensor, RecurrentState]:
    B, T, _ = inputs.shape
    D = 2 if rnn.bidirectional else 1
    by_step = inputs.transpose(0, 1).flatten(0, 1)  # (T B, I)
    if D == 2:  # noqa: PLR2004
        assert order is not None
        by_step = torch.stack([by_step, swap_rows(by_step, order.reverse)])
    gates = input_gates(rnn, weights, by_step)
    gates = gates.view(*gates.shape[:-2], T, B, -1)
    if start is None:
        zeros = gates.new_zeros(*gates.shape[:-3], B, rnn.hidden_size)
        start = zeros, zeros if isinstance(rnn, nn.LSTM) else None
    hidden, cell = _run_cells(rnn, weights, gates, start)
    if D == 1:
        outputs = hidden.transpose(0, 1)
    else:
        assert order is not None
        backward = swap_rows(hidden[1].flatten(0, 1), order.reverse).view(T, B, -1)
        outputs = torch.cat([hidden[0], backward], dim=-1).transpose(0, 1)
    if order is None:
        return outputs, RecurrentState((hidden[-1],), () if cell is None else (cell[-1],))
    outputs = (outputs * order.valid).contiguous()
    return outputs, RecurrentState(*(() if part is None else _last(part, order) for part in (hidden, cell)))


def _run_cells(rnn: Recurrent, weights: LayerWeights, gates: Tensor, start: LayerState) -> tuple[Tensor, Tensor | None]:
    """(T, B, G), the state before -> hidden and cell states after each step (T, B, H); or all with D in front."""
    state, states = start, []
    with loop():
        for step in gates.unbind(-3):
            state = zone_out(rnn, weights, step_layer(rnn, weights, step, *state), state)
            states.append(state)
    hidden = torch.stack([h for h, _ in states], dim=-3)
    return hidden, None if state[1] is None else torch.stack([c for _, c in states if c is not None], dim=-3)


def _last(states: Tensor, order: _Order) -> tuple[Tensor, ...]:
    """(T, B, H) or (D, T, B, H) -> D x (B, H) at the end of each sentence."""
    t, b = order.last
    return states[:, t, b].unbind(0) if states.dim() == 4 else (states[t, b],)  # noqa: PLR2004


def _run_torch(
    rnn: Recurrent, inputs: Tensor, lengths: Tensor | None, start: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    packed: Tensor | PackedSequence = inputs
    if lengths is not None:
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    initial = None
    if start is not None:
        hidden, *cell = (torch.stack(part).to(inputs.dtype) for part in start if part)
        initial = (hidden, *cell) if cell else hidden
    outputs, final = rnn(packed, initial)
    if lengths is not None:
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])
    D = 2 if rnn.bidirectional else 1
    parts = [part[-D:].unbind(0) for part in (final if isinstance(final, tuple) else (final,))]
    return outputs, RecurrentState(parts[0], parts[1] if len(parts) > 1 else ())
