"""The encoder, and the bridge from it to the decoder's initial state.

Shapes: B batch, S source positions, E width of an embedding, M width of the encoder states.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.model.recurrent import LayerParameters, Recurrent, RecurrentState, UpperLayers, run_rnn
from nmt.ops.draws import Dropout
from nmt.ops.products import Linear


class SelfAttention(nn.Module):
    """Self-attention over encoder states: h'_s = LayerNorm(h_s + attention(h_s, h))   (Vaswani et al. 2017, 3.1). The
    feed-forward layer of the paper is left out, because the states come from a recurrent network."""

    def __init__(self, attention: Attention | MultiHeadAttention, dim: int, dropout: Dropout) -> None:
        """dim: M; dropout: applied to the contexts before they are added."""
        super().__init__()
        self.attention, self.norm, self.dropout = attention, nn.LayerNorm(dim), dropout

    def forward(self, states: Tensor, valid: Tensor) -> Tensor:
        """Compute h': (B, S, M), bool (B, S), False at padding -> (B, S, M), 0 at padding."""
        context = self.attention.sequence(states, self.attention.remember(states, valid)).context
        attended: Tensor = self.norm(states + self.dropout(context))
        return attended * valid[:, :, None]


class Encoded(NamedTuple):
    """What the encoder makes of a batch of source sentences."""

    states: Tensor  # (B, S, M) encoder states; 0 at padding
    summary: Tensor  # (B, summary_dim) the whole sentence in one vector
    valid: Tensor  # bool (B, S), False at padding
    nonempty: bool  # does every sentence have a token?


class Encoder(nn.Module):
    """The encoder. Its states h_s join both directions (Schuster and Paliwal 1997; Bahdanau et al. 2015, 3.2). With
    upper layers, only the layers below them read in both directions (Wu et al. 2016, 3.2)."""

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
        """summary: "final" joins the last states of the top layer's directions, with the cell states of an LSTM; "mean"
        averages the encoder states; upper: layers of one direction above `rnn`; residual: see
        `collect_layers`; dropout: applied to states and summary."""
        super().__init__()
        self.rnn, self.residual, self.upper = rnn, residual, upper
        self.self_attention = nn.ModuleList(self_attention)  # run one after another over the states of the top layer
        self.dropout = Dropout(dropout)
        self.summary = summary
        directions = 2 if rnn.bidirectional and upper is None else 1
        self.output_dim = rnn.hidden_size * directions
        with_cell = summary == "final" and isinstance(rnn, nn.LSTM)
        self.summary_dim = self.output_dim * (2 if with_cell else 1)

    def forward(self, embedded: Tensor, lengths: Tensor, layers: Sequence[LayerParameters] | None = None) -> Encoded:
        """Encode embedded tokens (B, S, E) of sentences with lengths int64 (B,). The lengths are on the CPU, or on the
        GPU for a CUDA graph. layers: the layers of `rnn` as a search prepared them; by default prepared here."""
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        valid = positions < lengths.to(embedded.device, non_blocking=True)[:, None]
        states, final = run_rnn(self.rnn, embedded, lengths, None, layers, self.residual)
        if self.upper is not None:
            states, final = self.upper(states, final, self.upper.collect_layers(), lengths)
        for layer in self.self_attention:
            states = layer(states, valid)
        if self.summary == "mean":
            summary = states.sum(1) / valid.sum(1, keepdim=True).to(states.dtype)
        else:
            summary = torch.cat([*final.hidden, *final.cell], dim=-1)
        # Lengths on a GPU are not read, because the CPU would wait for the GPU. Only training puts lengths there, and
        # its sentences are never empty.
        nonempty = lengths.is_cuda or bool((lengths > 0).all())
        return Encoded(self.dropout(states), self.dropout(summary), valid, nonempty)


class Bridge(nn.Module):
    """Computes the decoder's initial state: tanh(W summary) for every layer   (Bahdanau et al. 2015, A.2.2).

    In the paper the summary is a state of the backward direction; here it covers both directions.
    """

    def __init__(self, summary_dim: int, layers: int, hidden: int, lstm: bool) -> None:
        super().__init__()
        self.shape = (layers * (2 if lstm else 1), hidden)
        self.layers = layers
        self.proj = Linear(summary_dim, self.shape[0] * hidden)

    def forward(self, summary: Tensor) -> RecurrentState:
        """Compute the state from the encoder's summary (B, summary_dim)."""
        states = torch.tanh(self.proj(summary)).view(-1, *self.shape).unbind(1)
        return RecurrentState(tuple(states[: self.layers]), tuple(states[self.layers :]))
