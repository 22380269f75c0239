"""What all sections of the configuration are made of: types of values, `Meaning`, `Conflict` and `Section`.

Numbers have an upper limit far beyond any published system, so that a typing error is reported at once, before it
exhausts the memory or overflows float32.
"""

import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nmt.config.errors import CONTROL, format_value


class Meaning(Enum):
    """Whether a key may change when a run is resumed, and whether runs that differ in it are different systems.

    A meaning is part of the annotation of a field. A key without a meaning must keep its value when a run is resumed.
    """

    PATH = "names a file or a folder, which may have been moved"
    NO_EFFECT = "changes nothing but rounding and the masks of dropout in a run's results"
    LENGTH = "decides when training stops: may change on resume, but runs that differ in it are different systems"
    DISPLAY = "decides what a validation shows: may change on resume, and runs that differ in it are the same system"


Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e6)]

Count = Annotated[int, Field(gt=0, le=2**31 - 1)]  # number of steps, tokens or sentences; fits an int32
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _refuse_control_characters(text: str) -> str:
    """Refuse control characters and bytes that are not UTF-8."""
    if CONTROL.search(text):
        raise ValueError(f"{format_value(text)} holds control characters or bytes that are not UTF-8")
    return text


# A text. YAML and Hydra read the name 7, such as that of a folder, as a whole number.
Name = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(min_length=1, max_length=4096),
    AfterValidator(_refuse_control_characters),
]
one_as_list = BeforeValidator(lambda value: [value] if isinstance(value, str | int) else value)
Names = Annotated[list[Name], one_as_list]
PathName = Annotated[Name, Meaning.PATH]
Paths = Annotated[list[PathName], Field(min_length=1), one_as_list]
BY_KIND = Field(discriminator="kind")  # `kind` chooses the section of a union


class Conflict:
    """A combination of values that makes no sense, stated as the message that refuses it:

    "KEY=VALUE needs NEEDS, but KEY=VALUE and KEY=VALUE; REMEDY"

    It occurs where all these terms hold, and `when` as well. A term is KEY=VALUE, KEY=VALUE|VALUE, KEY!=VALUE or
    KEY>NUMBER, or a KEY alone, whose value `when` compares. A key may end in an attribute that tells what a section can
    do, such as "score.reads_keys"; the message then shows the kind of this section. The remedy may hold attributes of
    the section, such as "{self.encoder.output_dim}".
    """

    def __init__(self, statement: str, when: Callable[[Any], bool] = lambda section: True) -> None:
        problem, _, self.remedy = statement.partition("; ")
        subject, _, problem = problem.partition(" needs ")
        self.needs, *others = problem.rsplit(", but ", 1)
        texts = [text for part in (subject, *others) for text in part.split(" and ")]
        self.terms = [_Term(*re.split("(=|!=|>)", text, maxsplit=1)) for text in texts]
        self.when = when

    @classmethod
    def each(cls, *statements: str, when: Callable[[Any], bool] = lambda section: True) -> "tuple[Conflict, ...]":
        """Make a conflict of each statement."""
        return tuple(cls(statement, when) for statement in statements)

    def occurs_in(self, section: "Section") -> bool:
        """Return whether the section has these values and `when` holds."""
        return all(term.holds_in(section) for term in self.terms) and self.when(section)

    def message(self, section: "Section") -> str:
        """State the conflict in one line, with the section's own values."""
        subject, *others = (_shown(section, term.key) for term in self.terms)
        but = f", but {' and '.join(others)}" if others else ""
        return f"{subject} needs {self.needs}{but}; {self.remedy.format(self=section)}"


class _Term(NamedTuple):
    key: str
    operator: str = ""
    operand: str = ""

    def holds_in(self, section: "Section") -> bool:
        """Return whether the term is true of the section: never if its key does not exist, always for a KEY alone."""
        value = _value(section, self.key)
        if value is _MISSING or not self.operator:
            return value is not _MISSING
        if self.operator == ">":
            return isinstance(value, int | float) and value > float(self.operand)
        return (format_value(value) in self.operand.split("|")) == (self.operator == "=")


_MISSING = object()


def _value(section: Any, key: str) -> object:  # noqa: ANN401
    """Return the value of a key such as "attention.score.kind", or _MISSING if a part of this path does not exist."""
    for part in key.split("."):
        section = getattr(section, part, _MISSING)
    return section


def _shown(section: Any, key: str) -> str:  # noqa: ANN401
    """Write KEY=VALUE for a message; for an attribute such as score.reads_keys, the kind of its section instead."""
    parent, _, name = key.rpartition(".")
    owner: Any = _value(section, parent) if parent else section
    if name not in owner.model_fields_set:
        key = f"{parent}.kind"
    return f"{key}={format_value(_value(section, key))}"


class Section(BaseModel):
    """A group of values. It is immutable, refuses unknown keys, and converts no value to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    conflicts: ClassVar[tuple[Conflict, ...]] = ()  # only the first conflict that occurs is reported

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for conflict in self.conflicts:
            if conflict.occurs_in(self):
                raise ValueError(conflict.message(self))
        return self


def members(annotation: Any) -> dict[str, type[BaseModel]]:  # noqa: ANN401
    """Map each `kind` of a union of sections to its section; a single section without a kind has the key "".

    Returns {} for an annotation without a section.
    """
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        tags = get_args(kind.annotation) if kind else ("",)
        return {str(tag): annotation for tag in tags}
    models: dict[str, type[BaseModel]] = {}
    for member in get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else ():
        models |= members(member)
    return models


def element(annotation: Any) -> Any:  # noqa: ANN401
    """Return the annotation of a list's elements, or None if the annotation contains no list."""
    if get_origin(annotation) is list:
        return get_args(annotation)[0]
    return next((inner for part in get_args(annotation) if (inner := element(part)) is not None), None)


def fields(annotation: Any, values: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the annotation of each field of a section. In a union of sections, the `kind` in `values` chooses one."""
    models = members(annotation)
    kind = values.get("kind", "") if isinstance(values, Mapping) else ""
    model = models.get(format_value(kind)) or next(iter(models.values()), None)
    return {} if model is None else {name: field.rebuild_annotation() for name, field in model.model_fields.items()}


def means(annotation: Any, *meanings: Meaning) -> bool:  # noqa: ANN401
    """Return whether any part of the annotation, such as the elements of a list, has one of the meanings."""
    return any(part in meanings or means(part, *meanings) for part in get_args(annotation))


def keys_with(schema: Any, *meanings: Meaning, prefix: str = "") -> set[str]:  # noqa: ANN401
    """Return the dotted keys, such as "data.train", whose fields have one of the meanings, for all kinds of a union."""
    keys = set()
    for model in members(schema).values():
        for name, annotation in fields(model, {}).items():
            if members(annotation):
                keys |= keys_with(annotation, *meanings, prefix=f"{prefix}{name}.")
            elif means(annotation, *meanings):
                keys.add(f"{prefix}{name}")
    return keys
