"""Search."""

from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import Count, CountOrZero, NonNegative, Positive, Section

MAX_HYPOTHESES = 10_000  # of a sentence at once; each has its own decoder state
BeamSize = Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
LengthPenalty = Literal["none", "average", "gnmt"]
LengthExponent = Annotated[float, Field(ge=0.0, le=10.0)]


class SearchLimits(Section):
    """Common values of all searches. Lengths are in tokens, including `</s>`."""

    min_length: CountOrZero
    max_length: Count
    max_ratio: Positive
    max_source_length: Count
    batch_tokens: Count
    replace_unknown: bool

    def needing_attention(self) -> str | None:
        """Return the override that has no meaning for a model without attention, if there is one."""
        return None


class Greedy(SearchLimits):
    kind: Literal["greedy"]


class Beam(SearchLimits):
    kind: Literal["beam"]
    beam_size: BeamSize
    length_penalty: LengthPenalty
    alpha: LengthExponent
    coverage_penalty: NonNegative
    stop: Literal["beam", "exact"]

    def needing_attention(self) -> str | None:
        return f"search.coverage_penalty={self.coverage_penalty}" if self.coverage_penalty else None


class Sampling(SearchLimits):
    kind: Literal["sampling"]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


class MinimumBayesRisk(SearchLimits):
    kind: Literal["mbr"]
    candidates: Literal["sampling", "beam"]
    n_candidates: Annotated[int, Field(gt=0, le=MAX_HYPOTHESES)]
    utility: Literal["chrf", "bleu"]
    temperature: Positive
    top_k: CountOrZero
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]


Search = Annotated[Greedy | Beam | Sampling | MinimumBayesRisk, Field(discriminator="kind")]
