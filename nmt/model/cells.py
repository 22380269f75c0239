"""One step of the recurrent cells, on the parameters of torch's own nn.RNN, nn.GRU and nn.LSTM.

The parts of a step that need only the input are given ready (`gates`), so that a caller can make them for all
steps in one product. Shapes: B batch, H hidden, G gates x H.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Recurrent = nn.RNN | nn.GRU | nn.LSTM


class CellState(NamedTuple):
    """State of all layers."""

    hidden: tuple[Tensor, ...]  # (B, H) for each layer
    memory: tuple[Tensor, ...]  # (B, H) for each layer of an LSTM, else empty

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


def layer_weights(rnn: Recurrent, layer: int) -> LayerWeights:
    """The parameters of one layer; under autocast converted here, once, not at every step."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    parameters = [getattr(rnn, f"{name}_l{layer}") for name in names]
    device = parameters[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        parameters = [parameter.to(dtype) for parameter in parameters]
    return LayerWeights(*parameters)


def step_layer(
    rnn: Recurrent, weights: LayerWeights, gates: Tensor, state: CellState, layer: int
) -> tuple[Tensor, Tensor | None]:
    """gates (B, G) = W_ih x + b_ih, previous state -> hidden (B, H), memory (B, H) of an LSTM or None."""
    previous = state.hidden[layer]
    recurrent = F.linear(previous, weights.weight_hh, weights.bias_hh)
    if isinstance(rnn, nn.GRU):
        return _gru(gates, recurrent, previous), None
    if isinstance(rnn, nn.LSTM):
        return _lstm(gates + recurrent, state.memory[layer])
    return torch.tanh(gates + recurrent), None


def _gru(gates: Tensor, recurrent: Tensor, previous: Tensor) -> Tensor:
    """h' = (1 - z) n + z h   (Cho et al. 2014, with the reset gate after the product as in cuDNN)."""
    H = previous.shape[1]
    reset_update = torch.sigmoid(gates[:, : 2 * H] + recurrent[:, : 2 * H])
    reset, update = reset_update.chunk(2, dim=1)
    new = torch.tanh(torch.addcmul(gates[:, 2 * H :], reset, recurrent[:, 2 * H :]))
    return torch.lerp(new, previous.to(new.dtype), update)


def _lstm(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """c' = f c + i g,  h' = o tanh c'   (Gers et al. 2000)."""
    let_in, forget, new, let_out = gates.chunk(4, dim=1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.sigmoid(let_out) * torch.tanh(memory), memory
