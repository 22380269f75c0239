"""The inference network of variational attention, which guesses the source positions of a target that it has read.

Shapes: B batch, S source positions, T target positions, E embedding, H hidden, M memory.
"""

import torch
from torch import Tensor, nn

from nmt.attention.alignment import sample_positions
from nmt.attention.scores import GeneralScore
from nmt.model.cells import Recurrent
from nmt.model.latent.mixture import Inferred
from nmt.model.recurrence import run_rnn
from nmt.ops.dropout import Dropout
from nmt.ops.precision import wide
from nmt.ops.sentence_draws import draw


class InferenceNetwork(nn.Module):
    """q(s | x, y) = softmax over s of g_t . W h_s, with g a bidirectional network over the whole target, and h the
    encoder's states   (Deng et al. 2018, 4; there with an encoder of its own).

    The softmax is over the positions where the prior is above 0, so that the divergence from it is finite.
    """

    def __init__(self, rnn: Recurrent, memory_dim: int, dropout: Dropout, sample: bool) -> None:
        """sample: one position is drawn from q, instead of all."""
        super().__init__()
        self.rnn, self.dropout, self.sample = rnn, dropout, sample
        self.score = GeneralScore(2 * rnn.hidden_size, memory_dim)

    def forward(self, embedded: Tensor, lengths: Tensor, states: Tensor, prior: Tensor) -> Inferred:
        """y_1 ... y_T (B, T, E), int64 (B,), (B, S, M), (B, T, S) -> Inferred."""
        read, _ = run_rnn(self.rnn, embedded, lengths)
        energies = wide(self.score(self.dropout(read), self.score.keys(states)))
        nowhere = prior.detach() == 0
        log_q = energies.masked_fill(nowhere, torch.finfo(energies.dtype).min).log_softmax(-1)
        q = log_q.exp().masked_fill(nowhere, 0.0)
        log_probs = log_q.masked_fill(nowhere, -torch.inf)
        if not self.sample:
            return Inferred(log_probs, q, None)
        B, T, _ = q.shape
        position = sample_positions(q, draw(B, T, q.device))
        return Inferred(log_probs, position, (position * log_q.masked_fill(nowhere, 0.0)).sum(-1))
