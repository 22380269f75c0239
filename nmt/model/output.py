"""The output layer: from readouts to logits.

Shapes: R readout, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nmt.ops.linear import Linear, linear

SHORTEST = 0.01  # a row to have the length 1


class Operands(NamedTuple):
    """What is multiplied, and added, to give logits."""

    readouts: Tensor  # (..., R)
    table: Tensor  # (V, R)
    bias: Tensor  # (V,)


class Output(Linear):
    """W r + b, or with fixnorm g cos(w_v, r) + b_v, so that no word is likely because its vector is long   (Nguyen and
    Chiang 2018, 3; g is learned and sqrt(R) at first, as by Nguyen and Salazar 2019)."""

    def __init__(self, readout_dim: int, vocabulary: int, fixnorm: bool = False) -> None:
        super().__init__(readout_dim, vocabulary)
        self.scale = nn.Parameter(torch.tensor(readout_dim**0.5)) if fixnorm else None

    def forward(self, readouts: Tensor) -> Tensor:
        """(..., R) -> logits (..., V)."""
        return linear(*self.operands(readouts))

    def operands(self, readouts: Tensor, table: Tensor | None = None) -> Operands:
        """(..., R) -> those of a product that makes the logits; `table` is one that was made before."""
        if self.scale is not None:
            readouts = self.scale * normalize(readouts, dim=-1)
        return Operands(readouts, self.table() if table is None else table, self.bias)

    def table(self) -> Tensor:
        """(V, R): a row for each word. (A tied table's padding is zero at first: `eps` bounds its gradient.)"""
        return self.weight if self.scale is None else normalize(self.weight, dim=-1, eps=SHORTEST)
