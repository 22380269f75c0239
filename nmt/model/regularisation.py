"""Regularisation and extensions of recurrent networks, prepared once per batch for all steps.

Shapes: B batch, H hidden, D directions.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.model.cells import LayerWeights, Norms, Recurrent, Transition, layer_parameters, layer_weights
from nmt.ops.dropout import dropout, mask


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
