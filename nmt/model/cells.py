"""One step of the recurrent cells, on the parameters of torch's own nn.RNN, nn.GRU and nn.LSTM.

The parts of a step that need only the input are given ready (`gates`), so that a caller can make them for all
steps in one product. Shapes: B batch, H hidden, G gates x H.
"""

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from nmt.ops.gru import gru_gates
from nmt.ops.linear import linear
from nmt.ops.shared import in_autocast_dtype

Recurrent = nn.RNN | nn.GRU | nn.LSTM


class CellState(NamedTuple):
    """State of all layers."""

    hidden: tuple[Tensor, ...]  # (B, H) for each layer
    memory: tuple[Tensor, ...]  # (B, H) for each layer of an LSTM, else empty

    def of(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Hidden state and memory of one layer."""
        return self.hidden[layer], self.memory[layer] if self.memory else None

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, for beam search."""
        return self._replace(
            hidden=tuple(layer.index_select(0, index) for layer in self.hidden),
            memory=tuple(layer.index_select(0, index) for layer in self.memory),
        )


class LayerWeights(NamedTuple):
    """One layer's parameters, in the precision of the computation."""

    weight_ih: Tensor  # (G, input)
    weight_hh: Tensor  # (G, H)
    bias_ih: Tensor  # (G,)
    bias_hh: Tensor  # (G,)


def layer_weights(rnn: Recurrent, layer: int, direction: Literal["", "_reverse"] = "") -> LayerWeights:
    """The parameters of one layer; under autocast converted here, once, not at every step."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return LayerWeights(*(in_autocast_dtype(getattr(rnn, f"{name}_l{layer}{direction}")) for name in names))


def step_layer(
    rnn: Recurrent, weights: LayerWeights, gates: Tensor, hidden: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """gates (B, G) = W_ih x + b_ih, previous hidden (B, H) and memory (B, H) of an LSTM -> the same after the step.

    For D directions with stacked weights all of them have D in front.
    """
    recurrent = linear(hidden, weights.weight_hh, weights.bias_hh)
    if isinstance(rnn, nn.GRU):
        return gru_gates(gates, recurrent, hidden), None
    if isinstance(rnn, nn.LSTM):
        assert memory is not None
        return _lstm(gates + recurrent, memory)
    return torch.tanh(gates + recurrent), None


def _lstm(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """c' = f c + i g,  h' = o tanh c'   (Gers et al. 2000)."""
    let_in, forget, new, let_out = gates.chunk(4, dim=-1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.sigmoid(let_out) * torch.tanh(memory), memory
