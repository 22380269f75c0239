"""Search and evaluation."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nmt.config.schema.base import Name, Section


class SearchLimits(Section):
    """What every search has. Lengths in tokens, `</s>` counted."""

    min_length: NonNegativeInt
    max_length: PositiveInt
    max_ratio: PositiveFloat
    max_source_length: PositiveInt
    batch_tokens: PositiveInt
    replace_unknown: bool


class Greedy(SearchLimits):
    kind: Literal["greedy"]


class Beam(SearchLimits):
    kind: Literal["beam"]
    beam_size: PositiveInt
    length_penalty: Literal["none", "average", "gnmt"]
    alpha: NonNegativeFloat


class Sampling(SearchLimits):
    kind: Literal["sampling"]
    temperature: PositiveFloat
    top_k: NonNegativeInt
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


Search = Annotated[Greedy | Beam | Sampling, Field(discriminator="kind")]


class Evaluation(Section):
    tokenize: Name
    lowercase: bool
