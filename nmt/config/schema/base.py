"""Types that all sections of the configuration share.

Numbers have upper limits far beyond any known system's values: a typing error is reported at once, not later as
exhausted memory or a float32 overflow.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nmt.config.errors import CONTROL, format_value

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]
Factor = Annotated[float, Field(ge=1.0, le=1e6)]  # ratio of the longer to the shorter length
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]  # energies divided by less would overflow
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]  # less rounds to 0 in float32 and causes a division by zero

Count = Annotated[int, Field(gt=0, le=2**31 - 1)]  # steps, tokens or sentences; fits an int32
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Units = Annotated[int, Field(gt=0, le=2**14)]  # width of a layer; 16384 units already need gigabytes of weights
Layers = Annotated[int, Field(gt=0, le=100)]
LayersOrZero = Annotated[int, Field(ge=0, le=100)]
Positions = Annotated[int, Field(gt=0, le=100_000)]  # in a sentence
Threads = Annotated[int, Field(gt=0, le=1024)]  # torch crashes with 100,000
Seed = Annotated[int, Field(ge=0, lt=2**32)]


def _refuse_control_characters(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError(f"{format_value(text)} holds control characters or bytes that are not UTF-8")
    return text


def as_list(value: Any) -> Any:  # noqa: ANN401
    """Wrap a single string or number in a list, so that KEY=A means KEY=[A]."""
    return [value] if isinstance(value, str | int) else value


Name = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_refuse_control_characters)]
Names = Annotated[list[Name], BeforeValidator(as_list)]
# A folder may be named 0, which YAML reads as an integer.
PathText = Annotated[Name, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
PathTexts = Annotated[list[PathText], Field(min_length=1), BeforeValidator(as_list)]


class Section(BaseModel):
    """A group of values: immutable, without unknown keys or implicit type conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each invalid combination of values; the first one is reported."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for message in self.conflicts():
            raise ValueError(message)
        return self
