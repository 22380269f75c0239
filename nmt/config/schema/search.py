"""Search."""

from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import ANY, Conflict, Count, CountOrZero, NonNegative, Positive, Section, next_multiple

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
    coverage_floor: Annotated[float, Field(ge=1e-6, le=1e6)]
    coverage_cap: Positive
    stop: Literal["beam", "exact"]
    groups: Count
    diversity: NonNegative

    conflicts = (
        Conflict(
            {"coverage_floor": ANY, "coverage_cap": ANY},
            "to be below the cap",
            "lower search.coverage_floor, or raise search.coverage_cap",
            lambda search: search.coverage_floor >= search.coverage_cap,
        ),
        Conflict(
            {"groups": ANY, "beam_size": ANY},
            "a beam that it divides",
            lambda search: f"set search.beam_size={next_multiple(search.beam_size, search.groups)}, or search.groups=1",
            lambda search: search.beam_size % search.groups,
        ),
    )

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
