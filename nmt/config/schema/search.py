"""Search."""

from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import Count, CountOrZero, Positive, Section

MAX_HYPOTHESES = 10_000  # of a sentence at once; each has its own decoder state


class SearchLimits(Section):
    """Common values of all searches. Lengths are in tokens, including `</s>`."""

    min_length: CountOrZero
    max_length: Count
    max_ratio: Positive
    max_source_length: Count
    batch_tokens: Count
    replace_unknown: bool


class Greedy(SearchLimits):
    kind: Literal["greedy"]


class Beam(SearchLimits):
    kind: Literal["beam"]
    beam_size: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
    length_penalty: Literal["none", "average", "gnmt"]
    alpha: Annotated[float, Field(ge=0.0, le=100.0)]
    stop: Literal["beam", "exact"]


class Sampling(SearchLimits):
    kind: Literal["sampling"]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


Search = Annotated[Greedy | Beam | Sampling, Field(discriminator="kind")]
