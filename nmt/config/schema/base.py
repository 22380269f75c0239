"""What every section of the configuration has.

Numbers have an upper limit too, far beyond what any system has used: what passes it is a slip of the keyboard, better
told at once than by a machine that is out of memory, or by sums that overflow in float32.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from nmt.config.errors import CONTROL, format_value

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]
Factor = Annotated[float, Field(ge=1.0, le=1e6)]  # a ratio of two lengths, the longer one's first
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]  # energies divided by less overflow
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]  # less is 0 in float32, and a division by 0

Count = Annotated[int, Field(gt=0, le=2**31 - 1)]  # of steps, tokens, sentences: what an int32 holds
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Units = Annotated[int, Field(gt=0, le=2**14)]  # a layer's width: 16384 units have gigabytes of recurrent weights
Layers = Annotated[int, Field(gt=0, le=100)]
LayersOrZero = Annotated[int, Field(ge=0, le=100)]
Positions = Annotated[int, Field(gt=0, le=100_000)]  # of a sentence
Threads = Annotated[int, Field(gt=0, le=1024)]  # of a hundred thousand, torch crashes
Seed = Annotated[int, Field(ge=0, lt=2**32)]


def _readable(text: str) -> str:
    """No control characters, which no file system, language or tokenizer has in its names."""
    if CONTROL.search(text):
        raise ValueError(f"{format_value(text)} holds control characters or bytes that are not UTF-8")
    return text


Name = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_readable)]  # as long as a path may be
Names = Annotated[list[Name], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
Place = Annotated[Name, BeforeValidator(lambda given: str(given) if type(given) is int else given)]  # a folder named 0
Places = Annotated[  # one or a list of them
    list[Place], Field(min_length=1), BeforeValidator(lambda given: [given] if isinstance(given, str | int) else given)
]


class Section(BaseModel):
    """A group of values: immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
