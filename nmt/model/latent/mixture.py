"""Predictions that sum over a latent source position.

p(y_t) = sum_s a_ts p(y_t | h_s): each position s has a weight and a readout of its own, computed from its encoder state
instead of the mean context (Deng et al. 2018, 3; Wu et al. 2018).

Shapes: B sentences, T target positions (or hypotheses of a sentence), S source positions, K positions in the sum,
P what a readout's activation gets, R readout.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Inferred(NamedTuple):
    """What an inference network says of the positions, given the whole target."""

    log_probs: Tensor  # (B, T, S) log q, -inf where the prior is 0
    weights: Tensor  # (B, T, S) q, or one sampled position
    log_prob: Tensor | None  # (B, T) log q of the sampled position


class Mixture(NamedTuple):
    """The readouts of source positions, and their weights."""

    readouts: Tensor  # (B, T, K, R)
    weights: Tensor  # (B, T, K), a row sums to 1, or to 0 in a sentence without positions
    positions: Tensor | None  # int64 (B, T, K); None: all S
    averages_losses: bool = False  # do the weights average losses (the evidence lower bound), not probabilities?

    def at(self, rows: Tensor, steps: Tensor) -> "Mixture":
        """One step of each sentence, int64 (N,) both -> (N, 1, K, ...)."""
        readouts, weights = (part[rows, steps][:, None] for part in (self.readouts, self.weights))
        return Mixture(readouts, weights, None if self.positions is None else self.positions[rows, steps][:, None])

    def between(self, start: int, stop: int) -> "Mixture":
        """The steps from `start` to `stop`."""
        positions = None if self.positions is None else self.positions[:, start:stop]
        return self._replace(
            readouts=self.readouts[:, start:stop], weights=self.weights[:, start:stop], positions=positions
        )

    def spread(self, weights: Tensor, length: int) -> Tensor:
        """Other weights (B, T, K) of the same positions -> (B, T, S)."""
        if self.positions is None:
            return weights
        return weights.new_zeros(*weights.shape[:2], length).scatter(-1, self.positions, weights)

    def posterior(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities (B, T, K) of a token -> p(s | token) (B, T, K) by Bayes' rule   (Shankar and Sarawagi 2019,
        eq. 3)."""
        nowhere = self.weights == 0
        joint = (self.weights.masked_fill(nowhere, 1.0).log() + log_probs).masked_fill(nowhere, torch.finfo().min)
        return joint.softmax(-1).masked_fill(nowhere, 0.0)


class Pending(NamedTuple):
    """What a posterior is computed from, once the token is known. N hypotheses."""

    readouts: Tensor  # (N, K, R)
    weights: Tensor  # (N, K)
    positions: Tensor | None  # int64 (N, K)
    partial: Tensor  # (N, P) the readout's input without a context

    @classmethod
    def of(cls, mixture: Mixture, partial: Tensor) -> Self:
        """A step's mixture, with a row for each hypothesis."""
        positions = None if mixture.positions is None else mixture.positions.flatten(0, 1)
        return cls(mixture.readouts.flatten(0, 1), mixture.weights.flatten(0, 1), positions, partial)

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch."""
        positions = None if self.positions is None else self.positions.index_select(0, index)
        readouts, weights, partial = (
            part.index_select(0, index) for part in (self.readouts, self.weights, self.partial)
        )
        return self._replace(readouts=readouts, weights=weights, positions=positions, partial=partial)

    def mixture(self, sentences: int) -> Mixture:
        """The hypotheses grouped by sentence."""
        readouts, weights = (part.view(sentences, -1, *part.shape[1:]) for part in (self.readouts, self.weights))
        K = weights.shape[-1]
        return Mixture(readouts, weights, None if self.positions is None else self.positions.view(sentences, -1, K))


def join_mixtures(steps: Sequence[Mixture]) -> Mixture:
    """Successive steps (B, 1, ...) as one (B, T, ...)."""
    readouts = torch.cat([step.readouts for step in steps], dim=1)
    weights = torch.cat([step.weights for step in steps], dim=1)
    positions = [step.positions for step in steps if step.positions is not None]
    return Mixture(readouts, weights, torch.cat(positions, dim=1) if positions else None)


class LatentPosition(NamedTuple):
    """How predictions sum over the source position."""

    top_k: int | None  # most probable positions in the sum; None: all
    min_share: float = 0.0  # of the largest weight; positions with less are left out
    observed: bool = False  # do later steps read the posterior, given the token?
    prior_share: float = 0.0  # of the distribution in that posterior

    def strongest(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, T, S) -> weights (B, T, K) of the most probable positions, summing to 1 again, and the positions."""
        positions = None
        if self.top_k is not None and weights.shape[-1] > self.top_k:
            weights, positions = weights.topk(self.top_k, dim=-1)
        elif not self.min_share:
            return weights, None
        if self.min_share:
            weights = weights.masked_fill(weights < self.min_share * weights.amax(-1, keepdim=True), 0.0)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0), positions
