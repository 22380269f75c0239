"""JSON records of runs and prepared corpora: only the fields that are read back; others stay unchecked."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt


class Record(BaseModel):
    """A JSON object from any source: known fields are checked, others are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class Start(Record):
    """How a run was started or resumed."""

    overrides: list[str] = []
    choices: dict[str, str] = {}
    machine: dict[str, Any] = {}
    start_from: dict[str, Any] = {}
    teachers: list[dict[str, Any]] = []


class Manifest(Record):
    """manifest.json of a run."""

    status: str | None = None
    starts: list[Start] = []
    data: dict[str, Any] = {}
    training: dict[str, Any] = {}


Pair = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]  # source, target


class SplitReport(Record):
    """Counts of a split's sentence pairs and tokens."""

    read: NonNegativeInt
    kept: NonNegativeInt
    dropped: dict[str, NonNegativeInt]
    tokens: Pair
    longest: Pair
    unknown_rate: Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]
    sources_in_train: NonNegativeInt = 0


class Report(Record):
    """report.json of a prepared corpus."""

    fingerprint: str
    content: str
    languages: Annotated[list[str], Field(min_length=2, max_length=2)]
    lowercase: bool
    vocabulary: Pair
    splits: dict[Literal["train", "validation", "test"], SplitReport]
