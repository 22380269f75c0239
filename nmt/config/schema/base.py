"""What every section of the configuration has."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(min_length=1)]
Place = Annotated[Name, BeforeValidator(lambda given: str(given) if type(given) is int else given)]  # a folder named 0
Places = Annotated[  # one or a list of them
    list[Place], Field(min_length=1), BeforeValidator(lambda given: [given] if isinstance(given, str | int) else given)
]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """A group of values: immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
