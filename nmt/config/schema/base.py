"""Types of values that several sections of the configuration use.

Numbers have an upper limit far beyond any published system, so that a typing error is reported at once, before it
exhausts the memory or overflows float32.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from nmt.config.errors import CONTROL, format_value
from nmt.config.keys import FilePath

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]
AtLeastOne = Annotated[float, Field(ge=1.0, le=1e6)]
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]  # smaller ones overflow the energies
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]  # smaller ones are 0 in float32, and lead to a division by 0

Count = Annotated[int, Field(gt=0, le=2**31 - 1)]  # of steps, tokens, sentences: an int32
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Units = Annotated[int, Field(gt=0, le=2**14)]  # width of a layer; 16384 units need gigabytes of recurrent weights
Layers = Annotated[int, Field(gt=0, le=100)]
LayersOrZero = Annotated[int, Field(ge=0, le=100)]
Positions = Annotated[int, Field(gt=0, le=100_000)]  # of a sentence
Device = Literal["auto", "cpu", "cuda", "mps"]
Processes = Annotated[int, Field(gt=0, le=1024)]
Threads = Annotated[int, Field(gt=0, le=1024)]  # torch crashes with a hundred thousand
Seed = Annotated[int, Field(ge=0, lt=2**32)]


def _refuse_control_characters(text: str) -> str:
    """Refuse control characters and bytes that are not UTF-8."""
    if CONTROL.search(text):
        raise ValueError(f"{format_value(text)} holds control characters or bytes that are not UTF-8")
    return text


Name = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_refuse_control_characters)]
one_as_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Names = Annotated[list[Name], one_as_list]
PathName = Annotated[Name, FilePath()]
Paths = Annotated[list[PathName], Field(min_length=1), one_as_list]
# Files of pretrained vectors: for the source and the target; null: none.
Vectors = Annotated[
    list[PathName | None],
    Field(min_length=2, max_length=2),
    BeforeValidator(lambda value: [value, value] if isinstance(value, str) else value),
]
# Each a run, a list of runs that form an ensemble, or a folder that stands for the runs below it.
Models = Annotated[list[Paths], Field(min_length=1), one_as_list]


# Each reports one error in place of one for every type of a union.
def _refuse_unless_layer(value: object) -> object:
    if isinstance(value, bool) or (type(value) is int and 2 <= value <= 100):  # noqa: PLR2004
        return value
    raise PydanticCustomError("first_layer", "Input should be true, false or the number of a layer from 2 to 100")


def _refuse_unless_directions(value: object) -> object:
    if isinstance(value, bool) or value == "first":
        return value
    raise PydanticKnownError("literal_error", {"expected": "true, false or 'first'"})


# The first of the layers that have something, counted from 1; true: the second, false: no layer has it.
FirstLayer = Annotated[bool | Annotated[int, Field(ge=2, le=100)], BeforeValidator(_refuse_unless_layer)]
# Which layers read in both directions: all, none or the first.
Bidirectional = Annotated[bool | Literal["first"], BeforeValidator(_refuse_unless_directions)]


class Section(BaseModel):
    """A group of values: immutable, without unknown keys or silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each invalid combination of values; the first one is reported."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for message in self.conflicts():
            raise ValueError(message)
        return self
