"""Normalizers: from an attention's energies to a distribution over source positions."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nmt.config.schema.base import NonNegative, Positions, Positive, Section, Temperature


class Softmax(Section):
    kind: Literal["softmax"]
    temperature: Temperature


class Sparsemax(Section):
    kind: Literal["sparsemax"]


class Entmax15(Section):
    kind: Literal["entmax15"]


class FirstOrder(Section):
    kind: Literal["first_order"]
    reach: Positions
    monotonic: bool


class Monotonic(Section):
    kind: Literal["monotonic"]
    noise: NonNegative
    initial_offset: Annotated[float, Field(ge=-1e6, le=1e6)]


class Mocha(Section):
    kind: Literal["mocha"]
    noise: NonNegative
    initial_offset: Annotated[float, Field(ge=-1e6, le=1e6)]
    chunk: Positions

    def conflicts(self) -> Iterator[str]:
        if self.chunk == 1:
            yield (
                "chunk=1 leaves the second score nothing to choose, so that it never learns; this is "
                "attention/normalizer=monotonic"
            )


class LinearChain(Section):
    kind: Literal["linear_chain"]


class Fertility(Section):
    kind: Literal["fertility"]
    fertility: Positive


SoftNormalizer = Softmax | Sparsemax | Entmax15 | LinearChain
Normalizer = Annotated[SoftNormalizer | FirstOrder | Fertility | Monotonic | Mocha, Field(discriminator="kind")]
