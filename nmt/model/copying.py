"""Copying source tokens into the translation (See et al. 2017, 2.2; Gu et al. 2016).

Shapes: B sentences, T target positions (or hypotheses of a sentence), S source positions, R readout, V vocabulary,
L its part that a search may use.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.ops.copying import copied_log_probs
from nmt.ops.linear import Linear
from nmt.ops.precision import wide

NEVER = -1  # in place of a source token that is not copied


class Copying(NamedTuple):
    """Readouts, and what copying makes of their predictions."""

    readouts: Tensor  # (B, T, R)
    shares: Tensor  # (B, T, 1 + S) of the output layer's prediction and of each source token, a row sums to 1
    source: Tensor  # int64 (B, S) tokens; any token where the share is always 0

    def log_probs(self, logits: Tensor) -> Tensor:
        """Logits of the output layer (B, T, V) -> log-probabilities of the mixture (B, T, V)."""
        tokens = self.source[:, None].expand(-1, logits.shape[1], -1)
        return copied_log_probs(logits, self.shares, tokens)

    def at(self, rows: Tensor, steps: Tensor) -> "Copying":
        """One step of each sentence, int64 (N,) both -> (N, 1, ...)."""
        readouts, shares = (part[rows, steps][:, None] for part in (self.readouts, self.shares))
        return Copying(readouts, shares, self.source[rows])

    def between(self, start: int, stop: int) -> "Copying":
        """The steps from `start` to `stop`."""
        return self._replace(readouts=self.readouts[:, start:stop], shares=self.shares[:, start:stop])


class CopyGate(nn.Module):
    """p(w) = g p_vocab(w) + (1 - g) sum of a_s over the positions s with source token w   (See et al. 2017, eq. 9).

    g = sigmoid(v . r + b) of the readout r, which is made of the context, the decoder's output and, unless it is
    attentional, the previous word; eq. 8 reads these by themselves. So the gate is one more row beside the output
    layer's, and a model prepared for search, whose contexts are multiplied with its weights, needs nothing else.

    What the attention does not give to a word goes to p_vocab: the weight on </s>, which is never copied, and what a
    window or monotonic reading leaves below 1.
    """

    def __init__(self, readout_dim: int) -> None:
        super().__init__()
        self.proj = Linear(readout_dim, 1)

    def forward(self, readouts: Tensor, weights: Tensor, source: Tensor) -> Copying:
        """(B, T, R), attention (B, T, S), int64 (B, S) tokens or NEVER -> Copying."""
        logit = self.proj(readouts)
        logit, never = wide(logit), source == NEVER
        weights = weights.to(logit.dtype).masked_fill(never[:, None], 0.0)
        left = (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0)
        copies = torch.sigmoid(-logit)  # 1 - g, exact where g is nearly 1
        shares = torch.cat([torch.sigmoid(logit) + copies * left, copies * weights], dim=-1)
        return Copying(readouts, shares, source.masked_fill(never, 0))


def copyable(source: Tensor, lengths: Tensor) -> Tensor:
    """int64 (B, S), int64 (B,) -> (B, S) with NEVER for </s>, the last token of each, and padding."""
    positions = torch.arange(source.shape[1], device=source.device)
    words = positions < lengths.to(source.device, non_blocking=True)[:, None] - 1
    return source.masked_fill(~words, NEVER)


def within(source: Tensor, vocabulary: Tensor) -> Tensor:
    """int64 (B, S), an ascending vocabulary (L,) -> (B, S) positions in it, NEVER for tokens that it lacks."""
    positions = torch.searchsorted(vocabulary, source).clamp_max(len(vocabulary) - 1)
    return torch.where(vocabulary[positions] == source, positions, NEVER)
