"""A score from a mixture of Gaussians over source positions, whose means only move forward.

Shapes: B batch, S source positions, T target positions, Q query, K Gaussians.
"""

import torch
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.parts import KeyUpdate, Score
from nmt.ops.linear import Linear
from nmt.ops.precision import wide

MAX_EXPONENT = 15.0  # e^15 positions are longer than any sentence, and their square is a number in float32


class GaussianMixtureScore(Score):
    """e_ts = log sum_k alpha_tk exp(-beta_tk (kappa_tk - s)^2), kappa_t = kappa_{t-1} + exp(.), with alpha_t, beta_t
    and the steps of kappa_t exponentials of linear functions of the query   (Graves 2013, eq. 46 to 51).

    A softmax divides the mixture by its sum over the positions; the paper does not, and its context fades where no
    Gaussian is near. Positions count from 1, kappa_0 = 0: with zero parameters, all Gaussians move by one position a
    step along the diagonal.

    The keys are the positions themselves, once for each Gaussian; the means are subtracted as a KeyUpdate.
    """

    reads_past = True

    def __init__(self, query_dim: int, components: int) -> None:
        """components: K."""
        super().__init__()
        self.moves = Linear(query_dim, components)
        self.shapes = Linear(query_dim, 2 * components)  # log alpha, log beta

    def keys(self, memory: Tensor) -> Tensor:
        """(B, S, M) -> float32 (B, S, K), the positions from 1."""
        B, S, _ = memory.shape
        positions = torch.arange(1, S + 1, dtype=torch.float32, device=memory.device)
        return positions[:, None].expand(B, S, self.moves.out_features)

    def key_projection(self) -> Tensor:
        """The identity (K, K)."""
        return torch.eye(self.moves.out_features, device=self.moves.weight.device)

    def key_features(self, past: Past) -> Tensor:
        """-kappa_t (B, S, K), of the past moved to this step."""
        assert past.means is not None
        return -past.means[:, None].expand(-1, past.weights.shape[-1], -1)

    def move(self, query: Tensor, past: Past) -> Past:
        """(B, 1, Q) -> the past with kappa_t."""
        steps = wide(self.moves(query))[:, 0].clamp(max=MAX_EXPONENT).exp()
        return past._replace(means=steps if past.means is None else past.means + steps)

    def forward(self, query: Tensor, keys: Tensor, update: KeyUpdate | None = None) -> Tensor:
        """(B, T, Q), (B, S, K) -> (B, T, S), unmasked, float32 or wider."""
        assert update is not None
        log_alpha, log_beta = wide(self.shapes(query))[:, :, None].chunk(2, dim=-1)  # (B, T, 1, K)
        squares = (keys + update.features).square()[:, None]
        return (log_alpha - log_beta.clamp(max=MAX_EXPONENT).exp() * squares).logsumexp(-1)
