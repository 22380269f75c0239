"""The comparison as one self-contained HTML file: tables, pictures, and translations with their attention."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nmt.compare import columns
from nmt.compare.columns import Cell
from nmt.compare.compare import Comparison
from nmt.compare.pictures import MASKING, THEME, Picture, key
from nmt.system.text_table import Column

UNKNOWN = Cell("\N{EN DASH}", None)


@dataclass(frozen=True)
class Heading:
    """A table column."""

    key: str
    text: str
    numeric: bool
    spread_width: int  # characters
    descending: bool


def page(comparisons: Sequence[Comparison], pictures: Sequence[Mapping[str, Picture]]) -> str:
    """Render the HTML file. Runs whose scores are not comparable come as several comparisons, one section each."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    sections = [_section(*section) for section in zip(comparisons, pictures, strict=True)]
    return environment.get_template("page.html").render(comparisons=sections, theme=THEME)


def breakable(name: str) -> Markup:
    """Allow a name such as attention/score=dot to break between its parts."""
    return Markup("<wbr>").join(re.split(r"(?<=[/=.,_])", name))


def _section(comparison: Comparison, pictures: Mapping[str, Picture]) -> dict[str, Any]:
    """Add the tables, pictures and marks that the template needs to a comparison."""
    numbers = {system["name"]: rank for rank, system in enumerate(comparison["systems"])}
    drawn = {name: picture.inline() for name, picture in pictures.items()}
    masking = {f"masking_{order}" for order in MASKING}
    return {
        **comparison,
        "system_table": _table(comparison, "systems", columns.system_columns(comparison)),
        "run_table": _table(comparison, "runs", columns.run_columns(comparison)),
        "difference_table": _table(comparison, "differences", columns.difference_columns(comparison)),
        "explained": _table(comparison, "systems", columns.explained_columns(comparison)),
        "power": columns.power(comparison),
        "notes": [columns.notes_on_scores(comparison), columns.notes_on_costs(comparison)],
        "numbers": numbers,
        "marks": {name: key(rank) for name, rank in numbers.items()},
        "charts": [picture for name, picture in drawn.items() if name not in masking],
        "masking_charts": [picture for name, picture in drawn.items() if name in masking],
        "examples": [{**example, "words": _common_source(example)} for example in comparison["examples"]],
    }


def _table(
    comparison: Comparison, rows_key: str, shown: Sequence[Column]
) -> tuple[list[Heading], list[tuple[str, list[Cell]]]]:
    """Format headings, and each row as (system, cells)."""
    rows, metric = comparison[rows_key], comparison["metric"]
    body = [
        (row.get("name", row.get("system")), [columns.cell(row, column, metric) or UNKNOWN for column in shown])
        for row in rows
    ]
    headings = []
    for index, column in enumerate(shown):
        cells = [cells[index] for _, cells in body]
        numeric = all(cell.value is None or isinstance(cell.value, int | float) for cell in cells)
        spread_width = max((len(cell.spread or "") for cell in cells), default=0)
        descending = column.key in columns.HIGHER_IS_BETTER
        headings.append(Heading(column.key, column.heading, numeric, spread_width, descending))
    return headings, body


def _common_source(example: Mapping[str, Any]) -> list[str] | None:
    """Return the source words as most systems segmented them; None without any alignment."""
    alignments = [translation["alignment"] for translation in example["translations"]]
    sources = Counter(tuple(alignment["source"]) for alignment in alignments if alignment)
    return list(sources.most_common(1)[0][0]) if sources else None
