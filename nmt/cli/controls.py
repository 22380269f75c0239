"""Files of nmt-translate that decide something in translations: constraints, glossary, forbidden phrases, prefixes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, BinaryIO

from nmt.config.errors import UserError, format_value
from nmt.config.overrides import user_path
from nmt.data.reading.text import is_blank, open_text, user_lines

if TYPE_CHECKING:
    from nmt.translate.guidance import Controls

Item = tuple[str, ...]  # a line of the input, its constraints, its prefix
TAB = "\t"


def read_controls(glossary: str | None, forbidden: str | None) -> "Controls":
    """What holds for all lines. Raises UserError for files that cannot be read, or are not in their format."""
    controls: Controls = {}
    if glossary is not None:
        controls["glossary"] = _glossary(f"glossary={glossary}", _lines("glossary", glossary))
    if forbidden is not None:
        phrases = _lines("forbidden", forbidden)
        for number, phrase in enumerate(phrases, 1):
            if is_blank(phrase) or TAB in phrase:
                problem = "holds a tab" if TAB in phrase else "is empty"
                raise UserError(f"forbidden={forbidden}: line {number} {problem}; give one phrase per line")
        controls["forbidden"] = phrases
    return controls


def with_controls(sources: Iterable[str], given: Mapping[str, BinaryIO]) -> Iterator[Item]:
    """Each line of the input with its constraints and its prefix, "" where there is no file. given: the open files, by
    their keys. Raises UserError if a file has more or fewer lines than the input, or is not in its format."""
    columns = [user_lines(f"{key}={file.name}", file) for key, file in given.items()]
    for number, (source, *values) in enumerate(zip_longest(sources, *columns), 1):
        for (key, file), value in zip(given.items(), values, strict=True):
            name = f"{key}={file.name}"
            if source is None or value is None:
                missing = "the input" if source is None else "this file"
                raise UserError(
                    f"{name}: line {number} is missing in {missing}; line N of this file belongs to line N of the "
                    "input, and may be empty"
                )
            if key == "prefix" and TAB in value:
                raise UserError(f"{name}: line {number} holds a tab; give the start of translation {number} alone")
            if key == "constraints" and value and any(map(is_blank, value.split(TAB))):
                raise UserError(
                    f"{name}: line {number} has an empty phrase; separate phrases by one tab, and leave the lines of "
                    "translations without constraints empty"
                )
        if source is not None:
            found = dict(zip(given, values, strict=True))
            yield source, found.get("constraints", ""), found.get("prefix", "")


def from_terminal(lines: Iterable[str]) -> Iterator[Item]:
    """Lines from a terminal: what follows a tab starts the translation."""
    for line in lines:
        source, _, prefix = line.partition(TAB)
        yield source, "", prefix.replace(TAB, " ")


def controls_of(items: Iterable[Item], common: "Controls") -> "Controls":
    """The controls of some lines together."""
    constraints, prefixes = ([item[part] for item in items] for part in (1, 2))
    controls: Controls = {**common}
    if any(constraints):
        controls["constraints"] = [line.split(TAB) if line else [] for line in constraints]
    if any(prefixes):
        controls["prefixes"] = prefixes
    return controls


def _glossary(name: str, lines: list[str]) -> dict[str, str]:
    found: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(lines, 1):
        pair = [side.strip() for side in line.split(TAB)]
        if len(pair) != len(("source", "target")) or any(map(is_blank, pair)):
            raise UserError(
                f"{name}: line {number} is {format_value(line)!r}; write a source phrase, one tab and a target phrase"
            )
        source, target = pair
        if found.setdefault(source, (target, number))[0] != target:
            raise UserError(
                f"{name}: line {number} translates {format_value(source)!r} in another way than line "
                f"{found[source][1]}; keep one of them"
            )
    return {source: target for source, (target, _) in found.items()}


def _lines(key: str, path: str) -> list[str]:
    try:
        with open_text(user_path(path)) as file:
            return list(user_lines(f"{key}={path}", file))
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be read ({error.strerror})") from None
