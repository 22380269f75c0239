"""What an attention does with its distribution over source positions."""

from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import Fraction, NonNegative, Positions, Positive, Probability, Section, Temperature, Units


class Expected(Section):
    kind: Literal["expected"]


class Sampled(Section):
    kind: Literal["sampled"]
    soft_share: Probability
    baseline: Literal["moving", "learned"]
    discount: Fraction
    weight: Positive
    entropy_weight: NonNegative


class StraightThrough(Section):
    kind: Literal["straight_through"]
    temperature: Temperature


class Latent(Section):
    """Common values of alignments that predict by a sum over positions."""

    top_k: Positions | None
    min_share: Annotated[float, Field(ge=0.0, lt=1.0)]


class Marginal(Latent):
    kind: Literal["marginal"]


class Variational(Latent):
    kind: Literal["variational"]
    estimator: Literal["enumerate", "sample"]
    dim: Units
    kl_weight: NonNegative


class Posterior(Latent):
    kind: Literal["posterior"]
    prior_share: Fraction


Alignment = Annotated[
    Expected | Sampled | StraightThrough | Marginal | Variational | Posterior, Field(discriminator="kind")
]
