"""Self-attention of the encoder over its recurrent states.

Shapes: B batch, S source positions, M memory.
"""

from torch import Tensor, nn

from nmt.attention.attention import Attention
from nmt.attention.heads import MultiHeadAttention
from nmt.ops.dropout import Dropout


class SelfAttention(nn.Module):
    """h'_s = LayerNorm(h_s + attention(h_s, h))   (Vaswani et al. 2017, 3.1, without the feed-forward layer: the
    states are recurrent)."""

    def __init__(self, attention: Attention | MultiHeadAttention, dim: int, dropout: Dropout) -> None:
        """dropout: on what the attention adds."""
        super().__init__()
        self.attention, self.norm, self.dropout = attention, nn.LayerNorm(dim), dropout

    def forward(self, states: Tensor, valid: Tensor) -> Tensor:
        """(B, S, M), bool (B, S) -> (B, S, M), zeros on padding."""
        memory, past = self.attention.remember(states, valid), self.attention.start(valid)
        context = self.attention.sequence(states, memory, past).context
        attended: Tensor = self.norm(states + self.dropout(context))
        return attended * valid[:, :, None]
