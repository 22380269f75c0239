"""The readout: from decoder state, context and previous word to the vector that the output layer sees.

Shapes: B batch, T target positions, H hidden, M memory, E embedding, R readout.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from nmt.ops.linear import Linear

Kind = Literal["attentional", "deep", "maxout"]


class Readout(nn.Module):
    """attentional: tanh(W [s; c]) (Luong et al. 2015, eq. 5); deep: tanh(W [s; c; y]) (Pascanu et al. 2014);
    maxout: max over pairs of W [s; c; y] (Goodfellow et al. 2013; Bahdanau et al. 2015, A.2.2).

    context_dim = 0: there is no context.
    """

    def __init__(self, kind: Kind, state_dim: int, context_dim: int, word_dim: int, readout_dim: int) -> None:
        super().__init__()
        self.kind, self.dim = kind, readout_dim
        word_dim = 0 if kind == "attentional" else word_dim
        width = readout_dim * (2 if kind == "maxout" else 1)
        self.proj = Linear(state_dim + context_dim + word_dim, width)

    def forward(self, state: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """(..., H), (..., M) or None, (..., E) -> (..., R)."""
        parts = [state]
        if context is not None:
            parts.append(context)
        if self.kind != "attentional":
            parts.append(word)
        projected: Tensor = self.proj(torch.cat(parts, dim=-1))
        if self.kind == "maxout":
            return projected.reshape(*projected.shape[:-1], -1, 2).amax(-1)
        return torch.tanh(projected)
