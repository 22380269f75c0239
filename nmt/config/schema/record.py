"""The parts of the JSON records of runs and prepared corpora that are read back; other entries are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt


class Record(BaseModel):
    """JSON that may come from anyone."""

    model_config = ConfigDict(extra="allow", strict=True)


class Start(Record):
    """One start of a run, or a resumption."""

    overrides: list[str] = []
    choices: dict[str, str] = {}
    machine: dict[str, Any] = {}
    start_from: dict[str, Any] = {}
    pretrained: dict[str, dict[str, Any]] = {}
    teachers: list[dict[str, Any]] = []


class Manifest(Record):
    """manifest.json."""

    status: str | None = None
    starts: list[Start] = []
    data: dict[str, Any] = {}
    training: dict[str, Any] = {}


Pair = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]  # source, target


class SplitReport(Record):
    """Counts of a split's pairs and tokens."""

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
