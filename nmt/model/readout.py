"""From decoder state, context and previous token to logits: readout, lexical model, output layer.

Shapes: B batch, S source positions, T target positions, H hidden, M memory, E embedding, R readout, V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nmt.ops.linear import Linear, linear
from nmt.ops.rows import rows

MIN_NORM = 0.01  # a shorter row of the output table is not normalised to length 1


class Readout(nn.Module):
    """attentional: tanh(W [s; c]) (Luong et al. 2015, eq. 5); deep: tanh(W [s; c; y]) (Pascanu et al. 2014);
    maxout: max over pairs of W [s; c; y] (Goodfellow et al. 2013; Bahdanau et al. 2015, A.2.2).

    context_dim = 0: no context.
    """

    def __init__(
        self,
        kind: Literal["attentional", "deep", "maxout"],
        state_dim: int,
        context_dim: int,
        word_dim: int,
        readout_dim: int,
    ) -> None:
        super().__init__()
        self.kind, self.dim = kind, readout_dim
        word_dim = 0 if kind == "attentional" else word_dim
        width = readout_dim * (2 if kind == "maxout" else 1)
        self.sizes = (state_dim, context_dim, word_dim)  # of the inputs
        self.proj = Linear(sum(self.sizes), width)

    def forward(self, state: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """(..., H), (..., M) or None, (..., E) -> (..., R)."""
        parts = [state]
        if context is not None:
            parts.append(context)
        if self.kind != "attentional":
            parts.append(word)
        projected: Tensor = self.proj(torch.cat(parts, dim=-1))
        return self.activation(projected)

    def parts(self) -> tuple[Tensor, Tensor]:
        """W without the context's columns (P, H + E), and these alone (P, M)."""
        of_state, of_context, of_word = torch.split(self.proj.weight, list(self.sizes), dim=1)
        return torch.cat([of_state, of_word], dim=1), of_context.contiguous()

    def activation(self, projected: Tensor) -> Tensor:
        """W [...] (..., P = R or 2 R) -> (..., R)."""
        if self.kind == "maxout":
            return projected.reshape(*projected.shape[:-1], -1, 2).amax(-1)
        return torch.tanh(projected)


def of_positions(partial: Tensor, contexts: Tensor, positions: Tensor | None) -> Tensor:
    """What the activation gets for each source position: (B, T, P) without a context, (B, S, P) of each position's own
    state, int64 (B, T, K) or None -> (B, T, K or S, P)."""
    if positions is None:
        return partial[:, :, None] + contexts[:, None]
    B, T, K = positions.shape
    starts = contexts.shape[1] * torch.arange(B, device=positions.device)[:, None, None]
    return partial[:, :, None] + rows(contexts, (positions + starts).flatten()).view(B, T, K, -1)


class LexicalModel(nn.Module):
    """tanh(W f + b) + f with f = tanh(sum over s of a_s e_s), where e_s are the source tokens' embeddings and a_s their
    attention weights (Nguyen and Chiang 2018, 4): rare words are translated as themselves, not as their neighbours.

    The result is added to the readout. The paper gives it an output layer of its own; here both share one.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = Linear(dim, dim)

    def forward(self, weights: Tensor, words: Tensor) -> Tensor:
        """(B, T, S), (B, S, E) -> (B, T, E)."""
        return self.of_attended(torch.bmm(weights.to(words.dtype), words))

    def of_attended(self, words: Tensor) -> Tensor:
        """sum over s of a_s e_s, or a single e_s: (..., E) -> (..., E)."""
        attended = torch.tanh(words)
        projected: Tensor = self.proj(attended)
        return torch.tanh(projected) + attended


class Operands(NamedTuple):
    """The logits are readouts @ weight.T + bias."""

    readouts: Tensor  # (..., R)
    weight: Tensor  # (V, R); in search a PackedWeight
    bias: Tensor  # (V,)


class OutputLayer(NamedTuple):
    """The output layer's parameters, ready for products with any number of readouts."""

    weight: Tensor  # (V, R), one row for each token; in search a PackedWeight
    bias: Tensor  # (V,)
    scale: Tensor | None  # () of fixnorm

    def operands(self, readouts: Tensor) -> Operands:
        """(..., R) -> the operands of the logits."""
        scaled = readouts if self.scale is None else self.scale * normalize(readouts, dim=-1)
        return Operands(scaled, self.weight, self.bias)

    def logits(self, readouts: Tensor) -> Tensor:
        """(..., R) -> (..., V)."""
        return linear(*self.operands(readouts))


class Output(Linear):
    """The output layer: W r + b, or with fixnorm g cos(w_v, r) + b_v, so that frequent words gain nothing by long
    vectors (Nguyen and Chiang 2018, 3; g is learned and starts at sqrt(R), as in Nguyen and Salazar 2019)."""

    def __init__(self, readout_dim: int, vocabulary: int, fixnorm: bool = False) -> None:
        super().__init__(readout_dim, vocabulary)
        self.scale = nn.Parameter(torch.tensor(readout_dim**0.5)) if fixnorm else None

    def forward(self, readouts: Tensor) -> Tensor:
        """(..., R) -> logits (..., V)."""
        return self.layer().logits(readouts)

    def layer(self) -> OutputLayer:
        """Prepare the parameters for products. (A tied table starts with zeros for padding: `eps` bounds its
        gradient.)"""
        weight = self.weight if self.scale is None else normalize(self.weight, dim=-1, eps=MIN_NORM)
        return OutputLayer(weight, self.bias, self.scale)
