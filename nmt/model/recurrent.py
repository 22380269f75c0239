"""Recurrent layers on the parameters of torch's own nn.RNN, nn.GRU and nn.LSTM, and the encoder made of them.

The part of the gates that depends on the input alone is computed for all steps in one product.

Shapes: B batch, T positions (S of a source), I width of the input, E width of an embedding, H width of a hidden state,
G gates x H, M width of the encoder states or of a context, D directions. Two directions are computed together: all
tensors of a step then have the dimension D in front.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.ops.draws import Dropout, dropout
from nmt.ops.products import Linear, Weight, defer, in_autocast_dtype, linear

Recurrent = nn.RNN | nn.GRU | nn.LSTM
LayerState = tuple[Tensor, Tensor | None]
"""The hidden state (B, H) and the cell state (B, H) of one layer; only an LSTM has a cell state."""
_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


class RecurrentState(NamedTuple):
    """The states of all layers."""

    hidden: tuple[Tensor, ...]  # (B, H) for each layer
    cell: tuple[Tensor, ...]  # (B, H) for each layer of an LSTM; empty for other networks

    def of(self, layer: int) -> LayerState:
        """Return the hidden state and the cell state of a layer, where 0 is the lowest layer."""
        return self.hidden[layer], self.cell[layer] if self.cell else None

    def layers(self, first: int, stop: int) -> Self:
        """Return the states of the layers `first` to `stop` - 1, where 0 is the lowest layer."""
        return self._replace(hidden=self.hidden[first:stop], cell=self.cell[first:stop])


class LayerParameters(NamedTuple):
    """The parameters of one layer as its steps multiply with them: in the precision of the products, or packed."""

    weight_ih: Weight  # (G, I)
    weight_hh: Weight  # (G, H)
    bias_ih: Tensor  # (G,)
    bias_hh: Tensor  # (G,)
    residual: bool  # is the input added to the output?

    def deferred(self) -> Self:
        """Return the layer for a loop over steps, which defers the gradients of the parameters to its end."""
        weight_ih, bias_ih = defer(self.weight_ih, self.bias_ih)
        weight_hh, bias_hh = defer(self.weight_hh, self.bias_hh)
        return self._replace(weight_ih=weight_ih, weight_hh=weight_hh, bias_ih=bias_ih, bias_hh=bias_hh)


def collect_layers(rnn: Recurrent, residual: int = 0, below: int = 0) -> list[LayerParameters]:
    """Collect the parameters of all layers, the lowest first, converted once to the dtype of products under autocast.

    residual: number of the first layer whose input is added to its output, counted from 1 (Wu et al. 2016, 3.1), or 0
    for none; below: the number of layers below this network.
    """
    layers, ways = [], ("", "_reverse")[: 1 + rnn.bidirectional]
    for number in range(rnn.num_layers):
        parameters = []
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            directions = [in_autocast_dtype(getattr(rnn, f"{name}_l{number}{way}")) for way in ways]
            parameters.append(torch.stack(directions) if rnn.bidirectional else directions[0])
        layers.append(LayerParameters._make([*parameters, 0 < residual <= below + number + 1]))
    return layers


def step_layer(
    rnn: Recurrent, layer: LayerParameters, gates: Tensor, hidden: Tensor, cell: Tensor | None
) -> LayerState:
    """Compute a layer's next state from the gates W x + b of its input (B, G) and its previous state."""
    recurrent = linear(hidden, layer.weight_hh, layer.bias_hh)
    if isinstance(rnn, nn.GRU):
        return gru_gates(gates, recurrent, hidden), None
    if isinstance(rnn, nn.LSTM):
        assert cell is not None
        return lstm_gates(gates, recurrent, cell)
    return torch.tanh(gates + recurrent), None


def gru_gates(gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:
    """Compute a GRU's next state h' from W x + b (..., 3H), U h + b' (..., 3H) and h (..., H)   (Cho et al. 2014).

    h' = (1 - z) n + z h, with r = sigmoid(W_r x + U_r h), z = sigmoid(W_z x + U_z h) and n = tanh(W_n x + r (U_n h)),
    biases left out here. The reset gate r is applied after the product with U_n, as in cuDNN. A GPU runs one kernel. On
    a CPU the gradient is written by hand, which takes fewer operations than autograd's.
    """
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden: Tensor = torch.ops.aten._thnn_fused_gru_cell(*_matrices(gates, recurrent, previous))[0]
        return hidden.view(previous.shape)
    if not torch.is_grad_enabled():
        return _next_state(gates, recurrent, previous)[0]
    hidden = _GRU.apply(gates, recurrent, previous)  # type: ignore[no-untyped-call]
    return hidden


def lstm_gates(gates: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Compute an LSTM's next states h', c' from W x + b (..., 4H), U h + b' (..., 4H) and c (..., H).

    h' = o tanh(c') and c' = f c + i n, with i, f, o = sigmoid and n = tanh of the sums W x + U h (Gers et al. 2000).
    The parameters hold the gates in the order i, f, n, o. On a CPU, autograd computes the gradient.
    """
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden, new = torch.ops.aten._thnn_fused_lstm_cell(*_matrices(gates, recurrent, cell))[:2]
        return hidden.view(cell.shape), new.view(cell.shape)
    into, forget, new, output = (gates + recurrent).chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(output) * torch.tanh(cell), cell


def _matrices(*operands: Tensor) -> Iterator[Tensor]:
    """Flatten operands (..., n) to matrices in the dtype of the first, as torch's fused kernels take them."""
    return (operand.to(operands[0].dtype).flatten(0, -2) for operand in operands)


def _next_state(gates: Tensor, recurrent: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    """Compute h' of a GRU and the tensors that its gradient needs: [r; z], U_n h + b', n, h."""
    H = previous.shape[-1]
    reset_update = (gates[..., : 2 * H] + recurrent[..., : 2 * H]).sigmoid_()
    reset, update = reset_update.chunk(2, dim=-1)
    inner = recurrent[..., 2 * H :]
    new = torch.addcmul(gates[..., 2 * H :], reset, inner).tanh_()
    previous = previous.to(new.dtype)
    return torch.lerp(new, previous, update), reset_update, inner, new, previous


class _GRU(torch.autograd.Function):
    """Computes h' of a GRU by `_next_state`, with a gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:  # noqa: ANN401
        ctx.dtypes = gates.dtype, recurrent.dtype, previous.dtype
        hidden, *saved = _next_state(gates, recurrent, previous)
        ctx.save_for_backward(*saved)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
        reset_update, inner, new, previous = ctx.saved_tensors
        reset, update = reset_update.chunk(2, dim=-1)
        previous_grad = grad * update
        new_grad = _tanh_backward(grad - previous_grad, new)
        both = _sigmoid_backward(torch.cat([new_grad * inner, grad * (previous - new)], dim=-1), reset_update)
        gates, recurrent = (torch.cat([both, part], dim=-1) for part in (new_grad, new_grad * reset))
        return gates.to(ctx.dtypes[0]), recurrent.to(ctx.dtypes[1]), previous_grad.to(ctx.dtypes[2])


def run_rnn(
    rnn: Recurrent,
    inputs: Tensor,
    lengths: Tensor | None = None,
    initial: RecurrentState | None = None,
    layers: Sequence[LayerParameters] | None = None,
    residual: int = 0,
) -> tuple[Tensor, RecurrentState]:
    """Run a network over inputs (B, T, I) -> outputs (B, T, D H), and the top layer's last states, D x (B, H).

    If the top layer has a residual connection, its last hidden states are its last outputs, which include its input.

    lengths: int64 (B,) of the sentences; outputs beyond a sentence's end are zero, and the backward direction starts at
    its end; by default all sentences have T positions. initial: initial states of one direction; by default zeros.
    layers: the result of `collect_layers`; by default collected here, with `residual`.

    A GPU runs torch's own call. A loop runs instead on a CPU, if `lengths` is on a GPU, and for several layers with
    residual connections, or with dropout but without `lengths`. The loop's weight gradients are computed once, after
    the backward loop.
    """
    packs = lengths is None or lengths.device.type == "cpu"
    # A call without `lengths` may be recorded as a CUDA graph, but cuDNN moves its dropout state when torch is seeded.
    drops = lengths is None and rnn.training and rnn.dropout > 0
    if inputs.device.type != "cpu" and packs and not (rnn.num_layers > 1 and (residual or drops)):
        return _run_torch(rnn, inputs, lengths, initial)
    order = None if lengths is None else _Order(lengths, inputs)
    final = RecurrentState((), ())
    for number, layer in enumerate(layers or collect_layers(rnn, residual)):
        below = dropout(inputs, rnn.dropout, rnn.training) if number else inputs
        outputs, last = _run_layer(rnn, layer, below, order, None if initial is None else initial.of(number))
        if layer.residual:
            outputs, last = _add_residual(inputs, final, outputs, last)
        inputs, final = outputs, last
    return inputs, final


def _add_residual(
    below: Tensor, final: RecurrentState, outputs: Tensor, last: RecurrentState
) -> tuple[Tensor, RecurrentState]:
    """Add the outputs and last states of the layer below to the outputs and last states of a residual layer."""
    return below + outputs, last._replace(hidden=tuple(map(torch.add, final.hidden, last.hidden)))


class _Order:
    """The ends of the sentences, and the order in which the backward direction reads their tokens."""

    def __init__(self, lengths: Tensor, inputs: Tensor) -> None:
        B, T, device = *inputs.shape[:2], inputs.device
        lengths = lengths.to(device, non_blocking=True)
        positions, rows = torch.arange(T, device=device)[:, None], torch.arange(B, device=device)
        self.valid = (positions < lengths).T[:, :, None]  # (B, T, 1)
        self.last = lengths - 1, rows  # (B,), (B,): last position and batch index of each sentence
        reverse = torch.where(positions < lengths, lengths - 1 - positions, positions)  # (T, B)
        # (T B,): the indices into flattened (T, B) that reverse each sentence
        self.reverse = (reverse * B + rows).flatten()


def swap_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Reorder all rows: (N, D), int64 (N,) -> (N, D). The index must be its own inverse, index[index[n]] = n, because
    it also reorders the gradient."""
    swapped: Tensor = _Swap.apply(tensor, index)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(index)
        return tensor.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None


def _run_layer(
    rnn: Recurrent, layer: LayerParameters, inputs: Tensor, order: _Order | None, state: LayerState | None
) -> tuple[Tensor, RecurrentState]:
    """Run one layer in a loop over the positions, from `state` or from zeros. With two directions, the sentences of the
    backward one are reversed before the loop and after it."""
    B, T, _ = inputs.shape
    D = 2 if rnn.bidirectional else 1
    by_step = inputs.transpose(0, 1).flatten(0, 1)  # (T B, I)
    if D == 2:  # noqa: PLR2004
        assert order is not None
        by_step = torch.stack([by_step, swap_rows(by_step, order.reverse)])
    gates = linear(by_step, layer.weight_ih, layer.bias_ih)
    gates = gates.view(*gates.shape[:-2], T, B, -1)
    if state is None:
        zeros = gates.new_zeros(*gates.shape[:-3], B, rnn.hidden_size)
        state = zeros, zeros if isinstance(rnn, nn.LSTM) else None
    states, layer = list[LayerState](), layer.deferred()
    for step in gates.unbind(-3):
        state = step_layer(rnn, layer, step, *state)
        states.append(state)
    hidden = torch.stack([h for h, _ in states], dim=-3)  # (T, B, H), or with D in front
    cell = None if state[1] is None else torch.stack([c for _, c in states if c is not None], dim=-3)
    if D == 1:
        outputs = hidden.transpose(0, 1)
    else:
        assert order is not None
        backward = swap_rows(hidden[1].flatten(0, 1), order.reverse).view(T, B, -1)
        outputs = torch.cat([hidden[0], backward], dim=-1).transpose(0, 1)
    if order is None:
        return outputs, RecurrentState((hidden[-1],), () if cell is None else (cell[-1],))
    outputs = (outputs * order.valid).contiguous()
    steps, rows = order.last
    last = (() if part is None else part.view(D, T, B, -1)[:, steps, rows].unbind(0) for part in (hidden, cell))
    return outputs, RecurrentState(*last)


def _run_torch(
    rnn: Recurrent, inputs: Tensor, lengths: Tensor | None, initial: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    """Run torch's own call. In a context of autocast to bf16, it computes in float32 and returns bf16. Autocast would
    let cuDNN compute in float16 instead, and gradients of an unscaled loss can be too small for float16."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
        with torch.autocast(kind, enabled=False):
            outputs, last = _run_torch(rnn, inputs.float(), lengths, initial)
        return outputs.bfloat16(), RecurrentState(*(tuple(state.bfloat16() for state in part) for part in last))
    packed: Tensor | PackedSequence = inputs
    if lengths is not None:
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    given = None
    if initial is not None:
        hidden, *cell = (torch.stack(part).to(inputs.dtype) for part in initial if part)
        given = (hidden, *cell) if cell else hidden
    outputs, final = rnn(packed, given)
    if lengths is not None:
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])
    D = 2 if rnn.bidirectional else 1
    parts = [part[-D:].unbind(0) for part in (final if isinstance(final, tuple) else (final,))]
    return outputs, RecurrentState(parts[0], parts[1] if len(parts) > 1 else ())


class UpperLayers(nn.Module):
    """Layers of one direction. Each reads the output of the layer below, concatenated with the context if there is one.

    Dropout applies to this input, context included. A residual connection adds only the output of the layer below. Both
    are computed outside the networks, so that a GPU can run each layer by torch's own call.
    """

    def __init__(self, layers: Sequence[Recurrent], residual: int = 0, dropout: float = 0.0) -> None:
        """layers: all layers above the first, the lowest first; residual: see `collect_layers`."""
        super().__init__()
        self.layers = cast(Iterable[Recurrent], nn.ModuleList(layers))
        self.residual, self.dropout = residual, Dropout(dropout)

    def collect_layers(self) -> list[LayerParameters]:
        """Collect the parameters of all layers, as the function `collect_layers` does for one network."""
        return [layer for n, rnn in enumerate(self.layers, 1) for layer in collect_layers(rnn, self.residual, n)]

    def forward(
        self,
        outputs: Tensor,
        final: RecurrentState,
        layers: Sequence[LayerParameters],
        lengths: Tensor | None = None,
        initial: RecurrentState | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Run all layers -> outputs (B, T, H) and last states of the top layer, as from `run_rnn`.

        outputs: (B, T, D H) of the first layer; final: its last states; layers: the result of `collect_layers`;
        lengths: as for `run_rnn`; initial: initial states of these layers, by default zeros; context: (B, T, M).
        """
        for n, (rnn, layer) in enumerate(zip(self.layers, layers, strict=True)):
            inputs = self.dropout(outputs if context is None else torch.cat([outputs, context], dim=-1))
            state = None if initial is None else initial.layers(n, n + 1)
            new, last = run_rnn(rnn, inputs, lengths, state, [layer._replace(residual=False)])
            if layer.residual:
                new, last = _add_residual(outputs, final, new, last)
            outputs, final = new, last
        return outputs, final


class SelfAttention(nn.Module):
    """Self-attention over encoder states: h'_s = LayerNorm(h_s + attention(h_s, h))   (Vaswani et al. 2017, 3.1). The
    feed-forward layer of the paper is left out, because the states come from a recurrent network."""

    def __init__(self, attention: Attention | MultiHeadAttention, dim: int, dropout: Dropout) -> None:
        """dim: M; dropout: applied to the contexts before they are added."""
        super().__init__()
        self.attention, self.norm, self.dropout = attention, nn.LayerNorm(dim), dropout

    def forward(self, states: Tensor, valid: Tensor) -> Tensor:
        """Compute h': (B, S, M), bool (B, S), False at padding -> (B, S, M), 0 at padding."""
        context = self.attention.sequence(states, self.attention.remember(states, valid)).context
        attended: Tensor = self.norm(states + self.dropout(context))
        return attended * valid[:, :, None]


class Encoded(NamedTuple):
    """What the encoder makes of a batch of source sentences."""

    states: Tensor  # (B, S, M) encoder states; 0 at padding
    summary: Tensor  # (B, summary_dim) the whole sentence in one vector
    valid: Tensor  # bool (B, S), False at padding
    nonempty: bool  # does every sentence have a token?


class Encoder(nn.Module):
    """The encoder. Its states h_s join both directions (Schuster and Paliwal 1997; Bahdanau et al. 2015, 3.2). With
    upper layers, only the layers below them read in both directions (Wu et al. 2016, 3.2)."""

    def __init__(
        self,
        rnn: Recurrent,
        summary: str,
        self_attention: Sequence[SelfAttention] = (),
        upper: UpperLayers | None = None,
        *,
        residual: int = 0,
        dropout: float = 0.0,
    ) -> None:
        """summary: "final" joins the last states of the top layer's directions, with the cell states of an LSTM; "mean"
        averages the encoder states; upper: layers of one direction above `rnn`; residual: see
        `collect_layers`; dropout: applied to states and summary."""
        super().__init__()
        self.rnn, self.residual, self.upper = rnn, residual, upper
        self.self_attention = nn.ModuleList(self_attention)  # run one after another over the states of the top layer
        self.dropout = Dropout(dropout)
        self.summary = summary
        directions = 2 if rnn.bidirectional and upper is None else 1
        self.output_dim = rnn.hidden_size * directions
        with_cell = summary == "final" and isinstance(rnn, nn.LSTM)
        self.summary_dim = self.output_dim * (2 if with_cell else 1)

    def forward(self, embedded: Tensor, lengths: Tensor, layers: Sequence[LayerParameters] | None = None) -> Encoded:
        """Encode embedded tokens (B, S, E) of sentences with lengths int64 (B,). The lengths are on the CPU, or on the
        GPU for a CUDA graph. layers: the parameters of `rnn` that a search has collected; by default collected here."""
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        valid = positions < lengths.to(embedded.device, non_blocking=True)[:, None]
        states, final = run_rnn(self.rnn, embedded, lengths, None, layers, self.residual)
        if self.upper is not None:
            states, final = self.upper(states, final, self.upper.collect_layers(), lengths)
        for layer in self.self_attention:
            states = layer(states, valid)
        if self.summary == "mean":
            summary = states.sum(1) / valid.sum(1, keepdim=True).to(states.dtype)
        else:
            summary = torch.cat([*final.hidden, *final.cell], dim=-1)
        # Lengths on a GPU are not read, because the CPU would wait for the GPU. Only training puts lengths there, and
        # its sentences are never empty.
        nonempty = lengths.is_cuda or bool((lengths > 0).all())
        return Encoded(self.dropout(states), self.dropout(summary), valid, nonempty)


class Bridge(nn.Module):
    """Computes the decoder's initial state: tanh(W summary) for every layer   (Bahdanau et al. 2015, A.2.2).

    In the paper the summary is a state of the backward direction; here it covers both directions.
    """

    def __init__(self, summary_dim: int, layers: int, hidden: int, lstm: bool) -> None:
        super().__init__()
        self.shape = (layers * (2 if lstm else 1), hidden)
        self.layers = layers
        self.proj = Linear(summary_dim, self.shape[0] * hidden)

    def forward(self, summary: Tensor) -> RecurrentState:
        """Compute the state from the encoder's summary (B, summary_dim)."""
        states = torch.tanh(self.proj(summary)).view(-1, *self.shape).unbind(1)
        return RecurrentState(tuple(states[: self.layers]), tuple(states[self.layers :]))
