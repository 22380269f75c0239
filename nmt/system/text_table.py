"""Tables of results, in Markdown and for the terminal."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from nmt.config.errors import printable

MINUTES_OF_HOUR = 60
MARKUP = re.compile(r"[\\|\[\]]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\*(?=\S)")


@dataclass(frozen=True)
class Column:
    """A column: the key of its value in each row, its heading and a formatter."""

    key: str
    heading: str
    show: Callable[[Any], str] = str


def markdown(rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> str:
    """Render a Markdown table: numbers aligned right, None as "-", special characters escaped."""
    return _render(rows, columns, "pipe", escaped)


def escaped(text: str) -> str:
    """Escape the characters of a text that Markdown would read as a tag, a character reference, emphasis, a link or the
    end of a cell."""
    return MARKUP.sub(r"\\\g<0>", text)


def terminal(rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> str:
    """Render a table in plain text, aligned as in `markdown`."""
    return _render(rows, columns, "simple", str)


def _render(
    rows: Sequence[Mapping[str, object]], columns: Sequence[Column], style: str, escape: Callable[[str], str]
) -> str:
    """Render a table in one of tabulate's styles."""

    def cell(column: Column, value: object) -> str:
        return "-" if value is None else escape(printable(" ".join(column.show(value).split())))

    return tabulate(
        [[cell(column, row[column.key]) for column in columns] for row in rows],
        headers=[column.heading for column in columns],
        tablefmt=style,
        # tabulate 0.9 raises an error if it has to align a table without rows.
        colalign=["right" if _is_numeric(rows, column) else "left" for column in columns] if rows else None,
        disable_numparse=True,  # cells are formatted already, and "1e5" may be a run's name
    )


def _is_numeric(rows: Sequence[Mapping[str, object]], column: Column) -> bool:
    return all(row[column.key] is None or isinstance(row[column.key], int | float) for row in rows)


def decimals(count: int) -> Callable[[float], str]:
    """Return a function that formats a number with `count` decimals."""
    return f"{{:.{count}f}}".format


def short(value: object) -> str:
    """Format a configuration value as a user types it; a float has 4 significant digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def human_count(count: int) -> str:
    """Format a count as 950, 12.3 k, 12.3 M or 1.2 B."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        # Switch to the next unit where rounding to one decimal would give 1000.0.
        if count >= unit * (1 - 0.5e-4):
            return f"{count / unit:.1f} {name}"
    return str(count)


def human_duration(seconds: float) -> str:
    """Format seconds as 42 s, 4 min 12 s or 1 h 03 min, rounded to the smallest unit shown."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < MINUTES_OF_HOUR:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    hours, minutes = divmod(round(seconds / 60), MINUTES_OF_HOUR)
    return f"{hours} h {minutes:02} min"


def counted(number: int, noun: str) -> str:
    """Format a number of things: "1 line", "2 lines"."""
    return f"{number} {noun}{'s' * (number != 1)}"
