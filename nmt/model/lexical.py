"""The lexical model: from the attended source words to the target word, past encoder and decoder.

Shapes: B batch, S source positions, T target positions, E embedding.
"""

import torch
from torch import Tensor, nn

from nmt.ops.linear import Linear


class LexicalModel(nn.Module):
    """tanh(W f + b) + f with f = tanh(sum over s of a_s e_s), e_s being the source words' embeddings and a_s their
    attention, so that a rare word is translated as itself and not as its neighbours   (Nguyen and Chiang 2018, 4).

    Added to the readout; the output layer, which the paper gives it one of its own, is that of the readout.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = Linear(dim, dim)

    def forward(self, weights: Tensor, words: Tensor) -> Tensor:
        """(B, T, S), (B, S, E) -> (B, T, E)."""
        attended = torch.tanh(torch.bmm(weights.to(words.dtype), words))
        projected: Tensor = self.proj(attended)
        return torch.tanh(projected) + attended
