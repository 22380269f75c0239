"""Attention: its parts, and the combinations that make sense."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.alignment import Alignment, Latent
from nmt.config.schema.base import CountOrZero, Layers, NonNegative, Positions, Positive, Probability, Section, Units
from nmt.config.schema.normalizers import Normalizer, SoftNormalizer


class DotScore(Section):
    kind: Literal["dot"]


class ScaledDotScore(Section):
    kind: Literal["scaled_dot"]


class GeneralScore(Section):
    kind: Literal["general"]


class AdditiveScore(Section):
    kind: Literal["additive"]
    dim: Units


class NormedAdditiveScore(Section):
    kind: Literal["normed_additive"]
    dim: Units


class ConcatScore(Section):
    kind: Literal["concat"]
    dim: Units
    layers: Layers


class CosineScore(Section):
    kind: Literal["cosine"]
    initial_strength: Positive


class LocationScore(Section):
    kind: Literal["location"]
    max_positions: Positions


class LocationAwareScore(Section):
    kind: Literal["location_aware"]
    dim: Units
    filters: Units
    width: Units

    def conflicts(self) -> Iterator[str]:
        if self.width % 2 == 0:
            yield f"width={self.width}: must be odd, to be centred on a position; try width={self.width + 1}"


class GaussianMixtureScore(Section):
    kind: Literal["gaussian_mixture"]
    components: Units


StatelessScore = (
    DotScore
    | ScaledDotScore
    | GeneralScore
    | AdditiveScore
    | NormedAdditiveScore
    | ConcatScore
    | CosineScore
    | LocationScore
)
Score = Annotated[StatelessScore | LocationAwareScore | GaussianMixtureScore, Field(discriminator="kind")]


class GlobalWindow(Section):
    kind: Literal["global"]


class LocalMonotonicWindow(Section):
    kind: Literal["local_m"]
    reach: Positions


class LocalPredictiveWindow(Section):
    kind: Literal["local_p"]
    reach: Positions
    dim: Units


Window = Annotated[GlobalWindow | LocalMonotonicWindow | LocalPredictiveWindow, Field(discriminator="kind")]


class NoCoverage(Section):
    kind: Literal["none"]


class LinearCoverage(Section):
    kind: Literal["linear"]
    loss_weight: NonNegative
    loss_start: CountOrZero


Coverage = Annotated[NoCoverage | LinearCoverage, Field(discriminator="kind")]


class NoHeads(Section):
    kind: Literal["none"]


class Heads(Section):
    kind: Literal["heads"]
    heads: Units
    dim: Units

    def conflicts(self) -> Iterator[str]:
        if self.dim % self.heads:
            multiple = self.heads * math.ceil(self.dim / self.heads)
            yield f"dim={self.dim} is not divisible by heads={self.heads}; try dim={multiple}"


Projection = Annotated[NoHeads | Heads, Field(discriminator="kind")]

# Scores without a linear term in the keys, to which coverage is added.
SCORES_WITHOUT_COVERAGE = {
    "cosine": "compares only the directions of the keys",
    "location": "does not read the keys",
    "gaussian_mixture": "does not read the keys",
}
# Normalizers whose weights depend on those of earlier steps.
RECURRENT_NORMALIZERS = {"first_order", "monotonic", "mocha", "fertility"}
# Normalizers that give the logarithms of a distribution, and those that give the logarithms of their weights.
NORMALIZERS_WITH_LOG_PROBS = {"softmax", "linear_chain"}
NORMALIZERS_WITH_LOG_WEIGHTS = NORMALIZERS_WITH_LOG_PROBS | {"monotonic", "mocha"}
# Normalizers that need positions which a window may leave out.
NORMALIZERS_WITHOUT_WINDOW = {
    "first_order": ("starts from its last position, which may be outside", "softmax"),
    "monotonic": ("starts from its last position, which may be outside", "softmax"),
    "mocha": ("starts from its last position, which may be outside", "softmax"),
    "fertility": ("gives the last position what the words' budgets leave over, but it may be outside", "sparsemax"),
}


class ScoredAttention(Section):
    kind: Literal["attention"]
    score: Score
    window: Window
    normalizer: Normalizer
    alignment: Alignment
    coverage: Coverage
    projection: Projection
    dropout: Probability

    def conflicts(self) -> Iterator[str]:
        score, window, normalizer = self.score.kind, self.window.kind, self.normalizer.kind
        if window != "global" and normalizer in NORMALIZERS_WITHOUT_WINDOW:
            reason, alternative = NORMALIZERS_WITHOUT_WINDOW[normalizer]
            yield (
                f"normalizer.kind={normalizer} {reason} window.kind={window}; use attention/window=global, or "
                f"attention/normalizer={alternative}"
            )
        if score == "gaussian_mixture" and normalizer in {"monotonic", "mocha"}:
            yield (
                f"score.kind=gaussian_mixture and normalizer.kind={normalizer} both decide how far the attention moves "
                "on; use attention/normalizer=softmax, or attention/score=normed_additive"
            )
        yield from _unused_projection(score, self.projection)
        if self.coverage.kind != "none" and score in SCORES_WITHOUT_COVERAGE:
            yield (
                f"coverage.kind={self.coverage.kind} adjusts the keys, but score.kind={score} "
                f"{SCORES_WITHOUT_COVERAGE[score]}; use attention/score=additive, or attention/coverage=none"
            )
        yield from self._conflicts_of_alignment()

    def _conflicts_of_alignment(self) -> Iterator[str]:
        alignment, normalizer = self.alignment.kind, self.normalizer.kind
        if alignment != "expected" and normalizer in {"monotonic", "mocha"}:
            yield (
                f"alignment.kind={alignment} needs a distribution over positions, but normalizer.kind={normalizer} may "
                "pass the end without one; use attention/alignment=expected, or "
                "attention/normalizer=first_order_monotonic"
            )
        if self.dropout and alignment in {"sampled", "straight_through"}:
            yield (
                f"dropout={self.dropout} would drop the only position that alignment.kind={alignment} selects; set "
                "attention.dropout=0, or use attention/alignment=expected"
            )
        if isinstance(self.coverage, LinearCoverage) and self.coverage.loss_weight and alignment == "sampled":
            yield (
                "coverage.loss_weight needs a gradient through the weights, which alignment.kind=sampled does not "
                "have; set attention.coverage.loss_weight=0, or attention/alignment=straight_through"
            )
        if isinstance(self.alignment, Latent) and self.projection.kind != "none":
            yield (
                f"alignment.kind={alignment} sums over the position of one attention, but projection.kind=heads "
                "attends with several; use attention/projection=none, or attention/alignment=sampled"
            )
        if isinstance(self.coverage, LinearCoverage) and self.coverage.loss_weight and alignment == "posterior":
            yield (
                "coverage.loss_weight compares distributions, but with alignment.kind=posterior the coverage is a sum "
                "of posteriors; set attention.coverage.loss_weight=0, or use attention/alignment=marginal"
            )
        if alignment == "variational" and normalizer not in NORMALIZERS_WITH_LOG_PROBS:
            yield (
                "alignment.kind=variational needs the logarithms of the distribution, which "
                f"normalizer.kind={normalizer} does not give; use attention/normalizer=softmax or linear_chain, or "
                "attention/alignment=marginal"
            )

    @property
    def reads_past(self) -> bool:
        """Does a step depend on what earlier steps attended to?"""
        return (
            self.score.kind in {"location_aware", "gaussian_mixture"}
            or self.coverage.kind != "none"
            or self.normalizer.kind in RECURRENT_NORMALIZERS
        )


class NoAttention(Section):
    kind: Literal["none"]
    context: Literal["first_state", "every_step"]


Attention = Annotated[ScoredAttention | NoAttention, Field(discriminator="kind")]


class NoSelfAttention(Section):
    kind: Literal["none"]


class EncoderSelfAttention(Section):
    kind: Literal["attention"]
    layers: Layers
    score: Annotated[StatelessScore, Field(discriminator="kind")]
    window: Window
    normalizer: Annotated[SoftNormalizer, Field(discriminator="kind")]
    projection: Projection
    dropout: Probability

    def conflicts(self) -> Iterator[str]:
        yield from _unused_projection(self.score.kind, self.projection)


SelfAttention = Annotated[NoSelfAttention | EncoderSelfAttention, Field(discriminator="kind")]


def unequal_sizes(score: str, projection: Projection, query: int, memory: int) -> bool:
    """Does this score compare vectors of unequal size?"""
    return score in {"dot", "scaled_dot"} and projection.kind == "none" and query != memory


def _unused_projection(score: str, projection: Projection) -> Iterator[str]:
    if projection.kind != "none" and score in {"location", "gaussian_mixture"}:
        yield (
            f"projection.kind=heads projects the keys, but score.kind={score} does not read them; use projection=none, "
            "or another score such as scaled_dot"
        )
