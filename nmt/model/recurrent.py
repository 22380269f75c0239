"""Recurrent networks on the parameters of torch's own nn.RNN, nn.GRU and nn.LSTM: a step of a layer, what regularises
and extends the layers, whole sequences, and layers above the first that differ from it.

The part of the gates that depends on the input alone is computed for all steps in one product.

Shapes: B batch, T positions, I inputs, H hidden, G gates x H, M context; D directions. For D directions computed
together, all tensors of a step have D in front.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from nmt.ops.draws import dropout, mask, masked, zoneout
from nmt.ops.linear import gru_gates, linear, lstm_gates
from nmt.ops.packed import Weight
from nmt.ops.precision import in_autocast_dtype
from nmt.ops.rows import swap_rows
from nmt.ops.shared import loop

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


class RecurrentOptions(NamedTuple):
    """Options of a recurrent network and of the dropout around it. All are off by default."""

    variational: bool = False  # every dropout draws one mask per sentence, for all its positions
    recurrent_dropout: float = 0.0
    zoneout: float = 0.0
    weight_drop: float = 0.0
    layer_norm: bool = False
    residual: int = 0  # the first layer, counted from 1, whose input is added to its output; 0: none
    transition_depth: int = 0
    dropout: float = 0.0  # of the encoder's states and summary, or of the decoder's readout


PLAIN = RecurrentOptions()


class Regularisation(nn.Module):
    """Applies to all layers and directions of one network.

    Recurrent dropout: on h_{t-1} where it enters W_hh, one mask per sentence (Gal and Ghahramani 2016); the state that
    gates carry over is not dropped. Weight drop: on the elements of W_hh, one mask per batch (Merity et al. 2018, 2).
    Zoneout: each unit of hidden and cell state keeps its value with this probability (Krueger et al. 2017). Layer norm:
    of W x and U h, and of an LSTM's cell state (Ba et al. 2016, supplement). Residual: from some layer on, a layer's
    output is added to its input (Wu et al. 2016, 3.1). Transitions: further steps at each position, without input
    (Pascanu et al. 2014; Miceli Barone et al. 2017), with all of the above but residual connections.
    """

    def __init__(self, rnn: Recurrent, options: RecurrentOptions, lowest: int = 0, below: int = 0) -> None:
        """lowest: the first layer that has transitions; below: the number of layers below the network."""
        super().__init__()
        self.options, self.lowest, self.below = options, lowest, below
        self.norm = LayerNorms(rnn, rnn) if options.layer_norm else None
        layers = range(lowest, rnn.num_layers)
        self.transitions = nn.ModuleList(
            TransitionParameters(rnn, layers, options.layer_norm)
            for _ in range(options.transition_depth if layers else 0)
        )

    def needs_loop(self, rnn: Recurrent) -> bool:
        """Is there an option that torch's own call does not support?"""
        options, stacked = self.options, rnn.num_layers > 1
        drops = options.recurrent_dropout or options.weight_drop or (options.variational and rnn.dropout and stacked)
        residual = options.residual and stacked
        always = options.layer_norm or residual or options.zoneout > 0 or len(self.transitions) > 0
        return bool(always or (rnn.training and drops))

    def prepare(self, rnn: Recurrent, rows: int) -> list[LayerWeights]:
        """The layers for a batch with this number of sentences, with masks drawn for all its steps."""
        return [self._layer(rnn, layer, rows) for layer in range(rnn.num_layers)]

    def _layer(self, rnn: Recurrent, layer: int, rows: int) -> LayerWeights:
        options, weights, number = self.options, layer_weights(rnn, layer), self.below + layer + 1
        between = rnn.dropout if options.variational and number > 1 else 0.0
        if self.norm is not None:
            bias_ih, bias_hh = layer_parameters(rnn, ("bias_ih", "bias_hh"), rnn, layer, cast=False)
            weights = weights._replace(bias_ih=bias_ih, bias_hh=bias_hh)
        return weights._replace(
            weight_hh=dropout(weights.weight_hh, options.weight_drop, rnn.training),
            norms=None if self.norm is None else self.norm.of(rnn, layer),
            input_mask=mask(weights.weight_hh, (rows, weights.weight_ih.shape[-1]), between, rnn.training),
            hidden_mask=self._hidden_mask(rnn, weights.weight_hh, rows),
            zoneout=options.zoneout,
            residual=0 < options.residual <= number,
            transitions=self._transitions(rnn, layer, rows) if layer >= self.lowest else (),
        )

    def _transitions(self, rnn: Recurrent, layer: int, rows: int) -> tuple[Transition, ...]:
        transitions = []
        for step in self.transitions:
            norms = step.norm.of(rnn, layer) if isinstance(step.norm, LayerNorms) else None
            (weight,) = layer_parameters(step, ("weight_hh",), rnn, layer)
            bias_ih, bias_hh = layer_parameters(step, ("bias_ih", "bias_hh"), rnn, layer, cast=norms is None)
            dropped = dropout(weight, self.options.weight_drop, rnn.training)
            transitions.append(Transition(dropped, bias_ih, bias_hh, norms, self._hidden_mask(rnn, weight, rows)))
        return tuple(transitions)

    def _hidden_mask(self, rnn: Recurrent, weight: Tensor, rows: int) -> Tensor | None:
        return mask(weight, (*weight.shape[:-2], rows, rnn.hidden_size), self.options.recurrent_dropout, rnn.training)


class TransitionParameters(nn.Module):
    """Parameters of one more step in some layers, with torch's names and initialisation for recurrent layers."""

    def __init__(self, rnn: Recurrent, layers: Iterable[int], layer_norm: bool) -> None:
        super().__init__()
        bound = rnn.hidden_size**-0.5
        for layer in layers:
            for way in ("", "_reverse")[: 1 + rnn.bidirectional]:
                for name in (f"{kind}_l{layer}{way}" for kind in ("weight_hh", "bias_ih", "bias_hh")):
                    drawn = nn.init.uniform_(torch.empty_like(getattr(rnn, name)), -bound, bound)
                    self.register_parameter(name, nn.Parameter(drawn))
        self.norm = LayerNorms(self, rnn) if layer_norm else None


class LayerNorms(nn.Module):
    """Parameters of layer normalisation, named after the matrices whose products they normalise."""

    def __init__(self, matrices: nn.Module, rnn: Recurrent) -> None:
        """`matrices`: the network itself, or its transitions."""
        super().__init__()
        for name, matrix in matrices.named_parameters():
            if name.startswith("weight"):
                self.register_parameter(name.replace("weight", "gain"), nn.Parameter(torch.ones(len(matrix))))
            if name.startswith("weight_hh") and isinstance(rnn, nn.LSTM):
                suffix = name.removeprefix("weight_hh")
                self.register_parameter(f"gain_memory{suffix}", nn.Parameter(torch.ones(rnn.hidden_size)))
                self.register_parameter(f"bias_memory{suffix}", nn.Parameter(torch.zeros(rnn.hidden_size)))

    def of(self, rnn: Recurrent, layer: int) -> Norms:
        """The parameters of one layer."""

        def of_layer(*names: str) -> list[Tensor]:
            return layer_parameters(self, names, rnn, layer, cast=False)

        (hidden,) = of_layer("gain_hh")
        inputs = of_layer("gain_ih")[0] if hasattr(self, f"gain_ih_l{layer}") else None
        if not isinstance(rnn, nn.LSTM):
            return Norms(inputs, hidden, None)
        gain, bias = of_layer("gain_memory", "bias_memory")
        return Norms(inputs, hidden, (gain, bias))


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


class UpperLayers(nn.Module):
    """Layers in one direction over [output of the layer below; context], or over the layer below alone.

    Dropout between layers applies to the whole input, residual connections to the output of the layer below. As these
    two are outside the modules, they do not keep a GPU from torch's own call.
    """

    def __init__(self, layers: Sequence[Recurrent], options: RecurrentOptions) -> None:
        """layers: from the second one on."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.regularisation = nn.ModuleList(Regularisation(rnn, options, below=n) for n, rnn in enumerate(layers, 1))

    def prepare(self, rows: int) -> list[LayerWeights]:
        """The layers for a batch with this number of sentences, with masks drawn for all its steps."""
        return [weights for rnn, regularisation in self._pairs() for weights in regularisation.prepare(rnn, rows)]

    def forward(
        self,
        outputs: Tensor,
        final: RecurrentState,
        layers: Sequence[LayerWeights],
        lengths: Tensor | None = None,
        start: RecurrentState | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """The first layer's outputs (B, T, D H) and last states, context (B, T, M) -> outputs (B, T, H) and last states
        of the top layer, as from `run_rnn`.

        layers: the result of `prepare`; lengths: as for `run_rnn`; start: initial states of these layers; None: zeros.
        """
        for n, ((rnn, regularisation), weights) in enumerate(zip(self._pairs(), layers, strict=True)):
            inputs = drop_inputs(rnn, weights, outputs if context is None else torch.cat([outputs, context], dim=-1))
            first = None if start is None else start.layers(n, n + 1)
            alone = weights._replace(residual=False)
            new, last = run_rnn(rnn, inputs, lengths, first, regularisation, [alone])
            if weights.residual:
                new = outputs + new
                last = last._replace(hidden=tuple(map(torch.add, final.hidden, last.hidden)))
            outputs, final = new, last
        return outputs, final

    def _pairs(self) -> Iterator[tuple[Recurrent, Regularisation]]:
        modules = cast(Iterable[Recurrent], self.layers), cast(Iterable[Regularisation], self.regularisation)
        return zip(*modules, strict=True)
