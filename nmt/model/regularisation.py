"""What a recurrent network has beyond torch's own, to learn much from little: prepared once a batch, for all steps.

Shapes: B batch, H hidden, D directions.
"""

from typing import NamedTuple

import torch
from torch import nn

from nmt.model.cells import LayerWeights, Norms, Recurrent, layer_parameters, layer_weights
from nmt.ops.dropout import dropout, mask


class Options(NamedTuple):
    """Of a recurrent network and of the dropout around it. By default none."""

    variational: bool = False  # every dropout draws one mask a sentence, for all its positions
    recurrent_dropout: float = 0.0
    zoneout: float = 0.0
    weight_drop: float = 0.0
    layer_norm: bool = False
    residual: bool = False


PLAIN = Options()


class Regularisation(nn.Module):
    """Of the steps of one network, in all layers and directions.

    Recurrent dropout: of h_{t-1} where it enters W_hh, one mask a sentence (Gal and Ghahramani 2016); what a gate
    carries on of the state is whole. Weight drop: of the elements of W_hh, one mask a batch (Merity et al. 2018, 2).
    Zoneout: each unit of state and memory keeps its value with this probability (Krueger et al. 2017). Layer norm: of
    W x and U h, and of an LSTM's memory (Ba et al. 2016, supplement). Residual: from the second layer on a layer's
    output is added to its input (Wu et al. 2016, 3.1).
    """

    def __init__(self, rnn: Recurrent, options: Options) -> None:
        super().__init__()
        self.options = options
        self.norm = LayerNorms(rnn) if options.layer_norm else None

    def needs_loop(self, rnn: Recurrent) -> bool:
        """Is there anything that torch's own call does not know?"""
        options = self.options
        drops = options.recurrent_dropout or options.weight_drop or (options.variational and rnn.dropout)
        return options.layer_norm or options.residual or options.zoneout > 0 or bool(rnn.training and drops)

    def prepare(self, rnn: Recurrent, rows: int) -> list[LayerWeights]:
        """The layers as a batch of so many sentences sees them: what it drops at all steps alike is drawn here."""
        return [self._layer(rnn, layer, rows) for layer in range(rnn.num_layers)]

    def _layer(self, rnn: Recurrent, layer: int, rows: int) -> LayerWeights:
        options, weights = self.options, layer_weights(rnn, layer)
        weight = weights.weight_hh
        shape = (*weight.shape[:-2], rows, rnn.hidden_size)
        between = rnn.dropout if options.variational and layer else 0.0
        return weights._replace(
            weight_hh=dropout(weight, options.weight_drop, rnn.training),
            norms=None if self.norm is None else self.norm.of(rnn, layer),
            input_mask=mask(weight, (rows, weights.weight_ih.shape[-1]), between, rnn.training),
            hidden_mask=mask(weight, shape, options.recurrent_dropout, rnn.training),
            zoneout=options.zoneout,
            residual=options.residual and layer > 0,
        )


class LayerNorms(nn.Module):
    """Parameters of layer normalisation, named as torch names the matrices whose products they normalise."""

    def __init__(self, rnn: Recurrent) -> None:
        super().__init__()
        for name, matrix in rnn.named_parameters():
            if name.startswith("weight"):
                self.register_parameter(name.replace("weight", "gain"), nn.Parameter(torch.ones(len(matrix))))
            if name.startswith("weight_hh") and isinstance(rnn, nn.LSTM):
                place = name.removeprefix("weight_hh")
                self.register_parameter(f"gain_memory{place}", nn.Parameter(torch.ones(rnn.hidden_size)))
                self.register_parameter(f"bias_memory{place}", nn.Parameter(torch.zeros(rnn.hidden_size)))

    def of(self, rnn: Recurrent, layer: int) -> Norms:
        """The parameters of one layer."""
        gains = layer_parameters(self, ("gain_ih", "gain_hh"), rnn, layer)
        if not isinstance(rnn, nn.LSTM):
            return Norms(gains[0], gains[1], None)
        gain, bias = layer_parameters(self, ("gain_memory", "bias_memory"), rnn, layer)
        return Norms(gains[0], gains[1], (gain, bias))
