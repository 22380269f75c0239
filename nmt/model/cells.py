"""One step of the recurrent cells, on the parameters of torch's own nn.RNN, nn.GRU and nn.LSTM.

The caller passes the part of the gates that depends on the input only, so that it can compute this for all steps in one
product. Shapes: B batch, I input, H hidden, G gates x H; for D directions computed together, all have D in front.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.ops.dropout import dropout, masked, zoneout
from nmt.ops.gates import gru_gates, lstm_gates
from nmt.ops.linear import linear
from nmt.ops.packed import Weight
from nmt.ops.precision import in_autocast_dtype

Recurrent = nn.RNN | nn.GRU | nn.LSTM
LayerState = tuple[Tensor, Tensor | None]
"""One layer's hidden state (B, H), and the cell state (B, H) of an LSTM."""


class RecurrentState(NamedTuple):
    """The states of all layers."""

    hidden: tuple[Tensor, ...]  # (B, H) of each layer
    cell: tuple[Tensor, ...]  # (B, H) of each layer of an LSTM, else empty

    def of(self, layer: int) -> LayerState:
        """Hidden state and cell state of one layer."""
        return self.hidden[layer], self.cell[layer] if self.cell else None

    def layers(self, start: int, stop: int) -> Self:
        """States of the layers from `start` up to but not including `stop`, counted from 0."""
        return self._replace(hidden=self.hidden[start:stop], cell=self.cell[start:stop])


class Norms(NamedTuple):
    """Parameters of the layer normalisation in one recurrent layer (Ba et al. 2016), which autocast leaves in float32.

    W_ih x and W_hh h are each normalised and multiplied by a gain before the layer's biases are added.
    """

    input: Tensor | None  # (G,) gain of W_ih x, where there is an input
    hidden: Tensor  # (G,) gain of W_hh h
    cell: tuple[Tensor, Tensor] | None  # (H,) gain and bias of an LSTM's cell state, as its output sees it


class Transition(NamedTuple):
    """A further step at each position, without input."""

    weight_hh: Tensor  # (G, H)
    bias_ih: Tensor  # (G,)
    bias_hh: Tensor  # (G,)
    norms: Norms | None = None
    hidden_mask: Tensor | None = None  # (B, H)
    packed: Weight | None = None  # replaces weight_hh in search


class LayerWeights(NamedTuple):
    """One layer's parameters in the precision of the computation, and its regularisation for one batch."""

    weight_ih: Tensor  # (G, I)
    weight_hh: Tensor  # (G, H)
    bias_ih: Tensor  # (G,)
    bias_hh: Tensor  # (G,)
    norms: Norms | None = None
    input_mask: Tensor | None = None  # (B, I), without D, of dropout, shared by all steps
    hidden_mask: Tensor | None = None  # (B, H), on the state where it enters weight_hh
    zoneout: float = 0.0
    residual: bool = False  # is the input added to the output?
    transitions: tuple[Transition, ...] = ()
    packed_ih: Weight | None = None  # these replace weight_ih and weight_hh in search
    packed: Weight | None = None


def layer_weights(rnn: Recurrent, layer: int) -> LayerWeights:
    """The parameters of one layer, under autocast converted once rather than at every step."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weight_ih, weight_hh, bias_ih, bias_hh = layer_parameters(rnn, names, rnn, layer)
    return LayerWeights(weight_ih, weight_hh, bias_ih, bias_hh)


def layer_parameters(
    module: nn.Module, names: tuple[str, ...], rnn: Recurrent, layer: int, cast: bool = True
) -> list[Tensor]:
    """Parameters of a module that uses torch's names for recurrent layers, with both directions stacked.

    `cast`: convert them to the precision of matrix products."""
    parameters = []
    for name in names:
        ways = [getattr(module, f"{name}_l{layer}{way}") for way in ("", "_reverse")[: 1 + rnn.bidirectional]]
        if cast:
            ways = [in_autocast_dtype(each) for each in ways]
        parameters.append(torch.stack(ways) if rnn.bidirectional else ways[0])
    return parameters


def input_gates(rnn: Recurrent, weights: LayerWeights, inputs: Tensor) -> Tensor:
    """(..., I) -> (..., G): W_ih x + b_ih, normalised if the layer has norms."""
    weight = weights.weight_ih if weights.packed_ih is None else weights.packed_ih
    if weights.norms is None:
        return linear(inputs, weight, weights.bias_ih)
    return norm_gates(rnn, weights, linear(inputs, weight))


def norm_gates(rnn: Recurrent, weights: LayerWeights, gates: Tensor) -> Tensor:
    """W_ih x (..., G) -> gain LN(W_ih x) + b_ih; unchanged without norms."""
    if weights.norms is None:
        return gates
    assert weights.norms.input is not None
    return _normed(rnn, gates, weights.norms.input, weights.bias_ih)


def step_layer(rnn: Recurrent, weights: LayerWeights, gates: Tensor, hidden: Tensor, cell: Tensor | None) -> LayerState:
    """gates (B, G) from `input_gates`, previous state -> next state, before zoneout.

    With transitions h_k = cell_k(0, h_{k-1})   (Pascanu et al. 2014; Miceli Barone et al. 2017).
    """
    state = _step_cell(rnn, weights, gates, hidden, cell)
    for transition in weights.transitions:
        state = _step_cell(rnn, transition, transition.bias_ih.unsqueeze(-2).expand_as(gates), *state)
    return state


def _step_cell(
    rnn: Recurrent, weights: LayerWeights | Transition, gates: Tensor, hidden: Tensor, cell: Tensor | None
) -> LayerState:
    norms, entering = weights.norms, masked(hidden, weights.hidden_mask)
    weight = weights.weight_hh if weights.packed is None else weights.packed
    if norms is None:
        recurrent = linear(entering, weight, weights.bias_hh)
    else:
        recurrent = _normed(rnn, linear(entering, weight), norms.hidden, weights.bias_hh)
    if isinstance(rnn, nn.GRU):
        return gru_gates(gates, recurrent, hidden), None
    if isinstance(rnn, nn.LSTM):
        assert cell is not None
        if norms is None:
            return lstm_gates(gates, recurrent, cell)
        assert norms.cell is not None
        return _normed_lstm(gates + recurrent, cell, norms.cell)
    return torch.tanh(gates + recurrent), None


def zone_out(rnn: Recurrent, weights: LayerWeights, new: LayerState, before: LayerState) -> LayerState:
    """The state after a step in which some units keep their previous value, drawn separately for hidden and cell
    state."""
    if not weights.zoneout:
        return new
    hidden, cell = (
        None if one is None or other is None else zoneout(one, other, weights.zoneout, rnn.training)
        for one, other in zip(new, before, strict=True)
    )
    assert hidden is not None
    return hidden, cell


def drop_inputs(rnn: Recurrent, weights: LayerWeights, inputs: Tensor) -> Tensor:
    """Dropout between layers, on the inputs (B, T, I) or (B, I) of a layer above the first."""
    if weights.input_mask is None:
        return dropout(inputs, rnn.dropout, rnn.training)
    return masked(inputs, weights.input_mask)


def _normed_lstm(gates: Tensor, cell: Tensor, norm: tuple[Tensor, Tensor]) -> LayerState:
    """c' = f c + i n,  h' = o tanh LN(c')   (Ba et al. 2016)."""
    input_gate, forget_gate, new, output_gate = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(forget_gate) * cell + torch.sigmoid(input_gate) * torch.tanh(new)
    return torch.sigmoid(output_gate) * torch.tanh(_layer_norm(cell, *norm)), cell


def _normed(rnn: Recurrent, products: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """All gates of a step together, but a GRU's candidate apart from its two gates   (Ba et al. 2016, supplement)."""
    if not isinstance(rnn, nn.GRU):
        return _layer_norm(products, gain, bias)
    sizes = [2 * rnn.hidden_size, rnn.hidden_size]
    parts = zip(*(torch.split(each, sizes, dim=-1) for each in (products, gain, bias)), strict=True)
    return torch.cat([_layer_norm(*part) for part in parts], dim=-1)


def _layer_norm(inputs: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """One direction after the other, as each has its own gain."""
    if gain.dim() > 1:
        return torch.stack([_layer_norm(*each) for each in zip(inputs, gain, bias, strict=True)])
    return F.layer_norm(inputs, gain.shape, gain, bias)
