"""Recurrent layers above the first, each a module of one layer.

The layers of torch's own stack are alike. An encoder whose first layer alone reads in both directions needs others, and
so does a decoder whose upper layers read a context beside the layer below (Wu et al. 2016, 3).

Shapes: B batch, T positions, H hidden, D directions of the first layer, M context.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nmt.model.cells import LayerWeights, Recurrent, RecurrentState, drop_inputs
from nmt.model.recurrence import run_rnn
from nmt.model.regularisation import RecurrentOptions, Regularisation


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
