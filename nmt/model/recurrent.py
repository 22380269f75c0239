"""Recurrent networks on the parameters of torch's own nn.RNN, nn.GRU and nn.LSTM, and the encoder made of them.

The part of the gates that depends on the input alone is computed for all steps in one product.

Shapes: B batch, T positions (S of a source), I inputs, E embedding, H hidden, G gates x H, M memory or context;
D directions. For D directions computed together, all tensors of a step have D in front.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.ops.layers import Dropout, Linear, Weight, dropout, in_autocast_dtype, linear, loop, swap_rows

Recurrent = nn.RNN | nn.GRU | nn.LSTM
LayerState = tuple[Tensor, Tensor | None]
"""One layer's hidden state (B, H), and the cell state (B, H) of an LSTM."""
_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


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


class PreparedLayer(NamedTuple):
    """One layer's parameters, ready for products at all steps: in the precision of the computation, or packed."""

    weight_ih: Weight  # (G, I)
    weight_hh: Weight  # (G, H)
    bias_ih: Tensor  # (G,)
    bias_hh: Tensor  # (G,)
    residual: bool  # is the input added to the output?


def prepare_layers(rnn: Recurrent, residual: int = 0, below: int = 0) -> list[PreparedLayer]:
    """Prepare all layers; under autocast, parameters are converted once rather than at every step.

    residual: the first layer, counted from 1, whose input is added to its output   (Wu et al. 2016, 3.1); 0 for none.
    below: the number of layers below the network.
    """
    ways = ("", "_reverse")[: 1 + rnn.bidirectional]

    def parameter(name: str, number: int) -> Tensor:
        directions = [in_autocast_dtype(getattr(rnn, f"{name}_l{number}{way}")) for way in ways]
        return torch.stack(directions) if rnn.bidirectional else directions[0]

    return [
        PreparedLayer(
            parameter("weight_ih", number),
            parameter("weight_hh", number),
            parameter("bias_ih", number),
            parameter("bias_hh", number),
            residual=0 < residual <= below + number + 1,
        )
        for number in range(rnn.num_layers)
    ]


def step_layer(rnn: Recurrent, layer: PreparedLayer, gates: Tensor, hidden: Tensor, cell: Tensor | None) -> LayerState:
    """Compute a layer's next state from the gates W x + b of its input (B, G) and its previous state."""
    recurrent = linear(hidden, layer.weight_hh, layer.bias_hh)
    if isinstance(rnn, nn.GRU):
        return gru_gates(gates, recurrent, hidden), None
    if isinstance(rnn, nn.LSTM):
        assert cell is not None
        return lstm_gates(gates, recurrent, cell)
    return torch.tanh(gates + recurrent), None


def gru_gates(gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:
    """Compute the pointwise part of a GRU's step: W x + b (..., 3H), U h + b' (..., 3H), h (..., H) ->
    h' = (1 - z) n + z h   (Cho et al. 2014), with r = sigmoid(.), z = sigmoid(.), n = tanh(. + r .): the reset gate
    after the product, as in cuDNN. One kernel on a GPU; on a CPU, the gradient by hand takes fewer operations than
    autograd's."""
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden: Tensor = torch.ops.aten._thnn_fused_gru_cell(*_rows(gates, recurrent, previous))[0]
        return hidden.view(previous.shape)
    if not torch.is_grad_enabled():
        return _next_state(gates, recurrent, previous)[0]
    hidden = _GRU.apply(gates, recurrent, previous)  # type: ignore[no-untyped-call]
    return hidden


def lstm_gates(gates: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the pointwise part of an LSTM's step: W x + b (..., 4H), U h + b' (..., 4H), c (..., H) ->
    h' = o tanh c' and c' = f c + i n   (Gers et al. 2000), with i, f and o = sigmoid(.), n = tanh(.), in the order
    i, f, n, o. On a CPU, a gradient by hand would gain nothing."""
    if gates.is_cuda and gates.dtype == recurrent.dtype:
        hidden, new = torch.ops.aten._thnn_fused_lstm_cell(*_rows(gates, recurrent, cell))[:2]
        return hidden.view(cell.shape), new.view(cell.shape)
    into, forget, new, output = (gates + recurrent).chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(output) * torch.tanh(cell), cell


def _rows(*operands: Tensor) -> Iterator[Tensor]:
    """Flatten operands (..., n) to (B, n) in the precision of the first, for the kernels of torch's own cells."""
    return (operand.to(operands[0].dtype).flatten(0, -2) for operand in operands)


def _next_state(gates: Tensor, recurrent: Tensor, previous: Tensor) -> tuple[Tensor, ...]:
    """Compute h', and what its gradient needs: r and z side by side, U_n h + b', n, h."""
    H = previous.shape[-1]
    reset_update = (gates[..., : 2 * H] + recurrent[..., : 2 * H]).sigmoid_()
    reset, update = reset_update.chunk(2, dim=-1)
    inner = recurrent[..., 2 * H :]
    new = torch.addcmul(gates[..., 2 * H :], reset, inner).tanh_()
    previous = previous.to(new.dtype)
    return torch.lerp(new, previous, update), reset_update, inner, new, previous


class _GRU(torch.autograd.Function):
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
    start: RecurrentState | None = None,
    layers: Sequence[PreparedLayer] | None = None,
    residual: int = 0,
) -> tuple[Tensor, RecurrentState]:
    """(B, T, I) -> outputs (B, T, D H) and the top layer's last states, D x (B, H); with residual connections,
    its last outputs instead of its hidden states.

    lengths: int64 (B,), the sentences' lengths: outputs beyond them are zero, and the backward direction starts there;
    by default all have T positions. start: initial states of one direction; by default zeros. layers: the result of
    `prepare_layers`; by default prepared here, with `residual`. On a CPU, with lengths on a GPU, and with residual
    connections, this is a loop with deferred weight gradients; elsewhere torch's own call.
    """
    packs = lengths is None or lengths.device.type == "cpu"
    if inputs.device.type != "cpu" and packs and not (residual and rnn.num_layers > 1):
        return _run_torch(rnn, inputs, lengths, start)
    order = None if lengths is None else _Order(lengths, inputs)
    final = RecurrentState((), ())
    for number, layer in enumerate(layers or prepare_layers(rnn, residual)):
        below = dropout(inputs, rnn.dropout, rnn.training) if number else inputs
        outputs, last = _run_layer(rnn, layer, below, order, None if start is None else start.of(number))
        if layer.residual:
            outputs, last = _add_residual(inputs, final, outputs, last)
        inputs, final = outputs, last
    return inputs, final


def _add_residual(
    below: Tensor, final: RecurrentState, outputs: Tensor, last: RecurrentState
) -> tuple[Tensor, RecurrentState]:
    """Add a layer's input, the outputs and last states of the layer below, to its own."""
    return below + outputs, last._replace(hidden=tuple(map(torch.add, final.hidden, last.hidden)))


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
    rnn: Recurrent, layer: PreparedLayer, inputs: Tensor, order: _Order | None, start: LayerState | None
) -> tuple[Tensor, RecurrentState]:
    B, T, _ = inputs.shape
    D = 2 if rnn.bidirectional else 1
    by_step = inputs.transpose(0, 1).flatten(0, 1)  # (T B, I)
    if D == 2:  # noqa: PLR2004
        assert order is not None
        by_step = torch.stack([by_step, swap_rows(by_step, order.reverse)])
    gates = linear(by_step, layer.weight_ih, layer.bias_ih)
    gates = gates.view(*gates.shape[:-2], T, B, -1)
    if start is None:
        zeros = gates.new_zeros(*gates.shape[:-3], B, rnn.hidden_size)
        start = zeros, zeros if isinstance(rnn, nn.LSTM) else None
    hidden, cell = _run_cells(rnn, layer, gates, start)
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


def _run_cells(rnn: Recurrent, layer: PreparedLayer, gates: Tensor, start: LayerState) -> tuple[Tensor, Tensor | None]:
    """(T, B, G), the state before -> hidden and cell states after each step (T, B, H); or all with D in front."""
    state, states = start, []
    with loop():
        for step in gates.unbind(-3):
            state = step_layer(rnn, layer, step, *state)
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

    def __init__(self, layers: Sequence[Recurrent], residual: int = 0) -> None:
        """layers: from the second one on. residual: see `prepare_layers`."""
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual

    def prepare(self) -> list[PreparedLayer]:
        """Prepare all layers for products."""
        return [layer for n, rnn in enumerate(self._rnns(), 1) for layer in prepare_layers(rnn, self.residual, n)]

    def forward(
        self,
        outputs: Tensor,
        final: RecurrentState,
        layers: Sequence[PreparedLayer],
        lengths: Tensor | None = None,
        start: RecurrentState | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """The first layer's outputs (B, T, D H) and last states, context (B, T, M) -> outputs (B, T, H) and last states
        of the top layer, as from `run_rnn`.

        layers: the result of `prepare`. lengths: as for `run_rnn`. start: initial states of these layers; by default
        zeros.
        """
        for n, (rnn, layer) in enumerate(zip(self._rnns(), layers, strict=True)):
            inputs = outputs if context is None else torch.cat([outputs, context], dim=-1)
            inputs = dropout(inputs, rnn.dropout, rnn.training)
            first = None if start is None else start.layers(n, n + 1)
            new, last = run_rnn(rnn, inputs, lengths, first, [layer._replace(residual=False)])
            if layer.residual:
                new, last = _add_residual(outputs, final, new, last)
            outputs, final = new, last
        return outputs, final

    def _rnns(self) -> Iterable[Recurrent]:
        return cast(Iterable[Recurrent], self.layers)


class SelfAttention(nn.Module):
    """h'_s = LayerNorm(h_s + attention(h_s, h))   (Vaswani et al. 2017, 3.1, without the feed-forward layer, as the
    states are recurrent)."""

    def __init__(self, attention: Attention | MultiHeadAttention, dim: int, dropout: Dropout) -> None:
        """dropout: of the attention's contexts, before they are added."""
        super().__init__()
        self.attention, self.norm, self.dropout = attention, nn.LayerNorm(dim), dropout

    def forward(self, states: Tensor, valid: Tensor) -> Tensor:
        """(B, S, M), bool (B, S) -> (B, S, M), zeros on padding."""
        memory, past = self.attention.remember(states, valid), self.attention.start(valid)
        context = self.attention.sequence(states, memory, past).context
        attended: Tensor = self.norm(states + self.dropout(context))
        return attended * valid[:, :, None]


class Encoded(NamedTuple):
    states: Tensor  # (B, S, M), zeros on padding
    summary: Tensor  # (B, summary_dim), the whole sentence in one vector
    valid: Tensor  # bool (B, S), False on padding
    nonempty: bool  # does every sentence have a token?


class Encoder(nn.Module):
    """Encoder states h_s, forward and backward side by side   (Schuster and Paliwal 1997; Bahdanau et al. 2015, 3.2).

    With upper layers, the layers below them alone read in both directions (Wu et al. 2016, 3.2).

    summary: "final" = each direction's last state of the top layer (with an LSTM's cell state beside it),
    "mean" = the average state.
    """

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
        """upper: layers in one direction above those of `rnn`. residual: see `prepare_layers`. dropout: of the states
        and of the summary."""
        super().__init__()
        self.rnn, self.residual, self.upper = rnn, residual, upper
        self.self_attention = nn.ModuleList(self_attention)  # over the states of the top layer, one after another
        self.dropout = Dropout(dropout)
        self.summary = summary
        directions = 2 if rnn.bidirectional and upper is None else 1
        self.output_dim = rnn.hidden_size * directions
        with_cell = summary == "final" and isinstance(rnn, nn.LSTM)
        self.summary_dim = self.output_dim * (2 if with_cell else 1)

    def forward(self, embedded: Tensor, lengths: Tensor, layers: Sequence[PreparedLayer] | None = None) -> Encoded:
        """(B, S, E), int64 (B,) on the CPU, or for a CUDA graph on the GPU -> Encoded. layers: those of `rnn`, prepared
        once for all searches."""
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        valid = positions < lengths.to(embedded.device, non_blocking=True)[:, None]
        states, final = run_rnn(self.rnn, embedded, lengths, None, layers, self.residual)
        if self.upper is not None:
            states, final = self.upper(states, final, self.upper.prepare(), lengths)
        for layer in self.self_attention:
            states = layer(states, valid)
        if self.summary == "mean":
            summary = states.sum(1) / valid.sum(1, keepdim=True).to(states.dtype)
        else:
            summary = torch.cat([*final.hidden, *final.cell], dim=-1)
        # On a GPU, lengths cannot be read without waiting; there no sentence is empty.
        nonempty = lengths.is_cuda or bool((lengths > 0).all())
        return Encoded(self.dropout(states), self.dropout(summary), valid, nonempty)


class Bridge(nn.Module):
    """The decoder's initial state: tanh(W summary) for every layer (Bahdanau et al. 2015, A.2.2; here of a summary of
    both directions)."""

    def __init__(self, summary_dim: int, layers: int, hidden: int, lstm: bool) -> None:
        super().__init__()
        self.shape = (layers * (2 if lstm else 1), hidden)
        self.layers = layers
        self.proj = Linear(summary_dim, self.shape[0] * hidden)

    def forward(self, summary: Tensor) -> RecurrentState:
        """(B, summary_dim) -> RecurrentState."""
        states = torch.tanh(self.proj(summary)).view(-1, *self.shape).unbind(1)
        return RecurrentState(tuple(states[: self.layers]), tuple(states[self.layers :]))
