"""The recurrent encoder, and self-attention over its states.

Shapes: B batch, S source positions, E embedding, H hidden, M = directions of the top layer x H memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.model.recurrent import PLAIN, LayerWeights, Recurrent, RecurrentOptions, Regularisation, UpperLayers, run_rnn
from nmt.ops.draws import Dropout


class SelfAttention(nn.Module):
    """h'_s = LayerNorm(h_s + attention(h_s, h))   (Vaswani et al. 2017, 3.1, without the feed-forward layer, as the
    states are recurrent)."""

    def __init__(self, attention: Attention | MultiHeadAttention, dim: int, dropout: Dropout) -> None:
        """dropout: of the attention's contexts, before they are added."""
        super().__init__()
        self.attention, self.norm, self.dropout = attention, nn.LayerNorm(dim), dropout

    def forward(self, states: Tensor, valid: Tensor) -> Tensor:
        """(B, S, M), bool (B, S) -> (B, S, M), zeros on padding."""
        memory, past = self.attention.remember(states, valid), self.attention.start(valid)
        context = self.attention.sequence(states, memory, past).context
        attended: Tensor = self.norm(states + self.dropout(context))
        return attended * valid[:, :, None]


class Encoded(NamedTuple):
    states: Tensor  # (B, S, M), zeros on padding
    summary: Tensor  # (B, summary_dim), the whole sentence in one vector


class Encoder(nn.Module):
    """Encoder states h_s, forward and backward side by side   (Schuster and Paliwal 1997; Bahdanau et al. 2015, 3.2).

    With upper layers, the layers below them alone read in both directions (Wu et al. 2016, 3.2).

    summary: "final" = each direction's last state of the top layer (with an LSTM's cell state beside it),
    "mean" = the average state.
    """

    def __init__(
        self,
        rnn: Recurrent,
        summary: str,
        self_attention: Sequence[SelfAttention] = (),
        options: RecurrentOptions = PLAIN,
        upper: UpperLayers | None = None,
    ) -> None:
        """upper: layers in one direction above those of `rnn`."""
        super().__init__()
        self.rnn, self.regularisation, self.upper = rnn, Regularisation(rnn, options), upper
        self.self_attention = nn.ModuleList(self_attention)  # over the states of the top layer, one after another
        self.dropout = Dropout(options.dropout, options.variational)
        self.summary = summary
        directions = 2 if rnn.bidirectional and upper is None else 1
        self.output_dim = rnn.hidden_size * directions
        with_cell = summary == "final" and isinstance(rnn, nn.LSTM)
        self.summary_dim = self.output_dim * (2 if with_cell else 1)

    def forward(
        self, embedded: Tensor, lengths: Tensor, valid: Tensor, layers: Sequence[LayerWeights] | None = None
    ) -> Encoded:
        """(B, S, E), int64 (B,), bool (B, S) -> Encoded. layers: those of `rnn`, prepared once for all searches."""
        states, final = run_rnn(self.rnn, embedded, lengths, None, self.regularisation, layers)
        if self.upper is not None:
            states, final = self.upper(states, final, self.upper.prepare(states.shape[0]), lengths)
        for layer in self.self_attention:
            states = layer(states, valid)
        if self.summary == "mean":
            summary = states.sum(1) / valid.sum(1, keepdim=True).to(states.dtype)
        else:
            summary = torch.cat([*final.hidden, *final.cell], dim=-1)
        return Encoded(self.dropout(states), self.dropout(summary))
