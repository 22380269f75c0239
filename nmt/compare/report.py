"""Gather the outputs to compare, and write the comparison: tables, pictures, JSON and a page."""

import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from nmt.compare import columns
from nmt.compare.columns import Cell
from nmt.compare.compare import ALL, SIGNIFICANT, Comparison, compare, find, group
from nmt.compare.entry import Entry, HeldOut, find_runs, read_run, read_systems, unfinished_sweeps
from nmt.compare.pictures import THEME, Picture, draw, key
from nmt.config.errors import UserError, nearest, printable
from nmt.evaluate.metrics import METRICS, sign_of
from nmt.system import text_table as table
from nmt.system.files import to_json, write_atomically
from nmt.system.text_table import Column, counted, human_duration

Render = Callable[[Sequence[Mapping[str, object]], Sequence[Column]], str]
UNKNOWN = Cell("\N{EN DASH}", None)
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
log = logging.getLogger(__name__)


def gather(runs: Sequence[str], systems: Sequence[str], split: str) -> tuple[list[Entry], HeldOut]:
    """Read the outputs to compare, with their test set. Raises UserError for outputs that cannot be compared, and for a
    run without results if `runs` names it itself; one that a folder or pattern led to is left out with a warning."""
    entries: list[Entry] = []
    held_out: HeldOut | None = None
    for path, named in find_runs(runs).items():
        try:
            entry, other = read_run(path, split)
        except UserError as error:
            if named:
                raise
            log.warning("left out: %s", error)
            continue
        if held_out is not None and (reason := held_out.difference(other)) is not None:
            raise UserError(f"{entry.name} and {entries[0].name} cannot be compared: {reason}")
        held_out = other
        entries.append(entry)
    if held_out is None:
        raise UserError(f"runs={','.join(runs)}: no run there has {split} results")
    others = read_systems(systems, held_out)
    if common := {entry.name for entry in entries} & {other.name for other in others}:
        raise UserError(f"systems: {common.pop()} is a run's name; give the system another one")
    return entries + others, held_out


def compare_runs(
    runs: Sequence[str],
    *,
    systems: Sequence[str] = (),
    split: str = "test",
    baseline: str | None = None,
    **settings: Any,  # noqa: ANN401
) -> Comparison:
    """Gather outputs and compare them. `settings` are passed on to `compare`. `baseline` names a system or a run, or is
    "all" for all pairs. Raises UserError for an unknown baseline, and as `gather` and `compare` do."""
    entries, held_out = gather(runs, systems, split)
    members = group(entries)
    base = baseline if baseline in (None, ALL) else find(baseline, members)
    if baseline is not None and base is None:
        names = [system.name for system in members]
        raise UserError(f"baseline={baseline}: not one of {', '.join(names)}{nearest(baseline, names)}")
    comparison = compare(members, held_out, split, baseline=base, **settings)
    return {**comparison, "missing": unfinished_sweeps(runs, entries)}


def write_comparison(runs: Sequence[str], output: Path, *, markdown: bool = False, **settings: Any) -> str:  # noqa: ANN401
    """Compare as `compare_runs` does, write all files to `output`, and return the tables to print."""
    comparison = compare_runs(runs, **settings)
    write_files(comparison, output)
    return tables(comparison, table.markdown if markdown else table.terminal)


def write_files(comparison: Comparison, output: Path) -> None:
    """Write comparison.json, .csv and .md, systems.csv, differences.csv, the pictures and the page to a folder."""
    write_atomically(output / "comparison.json", to_json({"comparisons": [comparison]}, indent=1).encode())
    for name, rows in {"comparison": "runs", "systems": "systems", "differences": "differences"}.items():
        write_atomically(output / f"{name}.csv", _csv(comparison, rows).encode())
    write_atomically(output / "comparison.md", f"{tables(comparison, table.markdown, in_full=True)}\n".encode())
    pictures = draw(comparison)
    for picture in pictures.values():
        write_atomically(output / f"{picture.name}.png", picture.png())
        write_atomically(output / f"{picture.name}.svg", picture.svg.encode())
    write_atomically(output / "index.html", page(comparison, pictures).encode())


def tables(comparison: Comparison, render: Render, in_full: bool = False) -> str:
    """Format the table of systems, with the difference that its tests can detect; `in_full`, also the columns that are
    otherwise left out, the table of runs and the notes."""
    metric = comparison["metric"]
    signature = f"{METRICS[metric].heading} {comparison['signatures'][metric]}"
    title = f"{comparison['split']}: {counted(comparison['sentences'], 'sentence')}, {signature}"
    left_out = set() if in_full else {*columns.IN_FULL, *list(comparison["signatures"])[2:]} - {metric}
    shown = [column for column in columns.system_columns(comparison) if column.key not in left_out]
    escape = table.escaped if render is table.markdown else str
    named = {
        **comparison,
        "baseline": comparison["baseline"] and escape(comparison["baseline"]),
        "unequal": [escape(name) for name in comparison["unequal"]],
    }
    missing = [escape(printable(sentence)) for sentence in comparison["missing"]]
    parts = [title, *missing, _text_table(comparison, "systems", shown, render)]
    parts += notes(named, in_full)
    if in_full and comparison["baseline"] is None and comparison["differences"]:
        parts += [_text_table(comparison, "differences", columns.difference_columns(comparison), render)]
    if in_full:
        parts += [_text_table(comparison, "runs", columns.run_columns(comparison), render)]
    return "\n\n".join(parts)


def notes(comparison: Comparison, in_full: bool = True) -> list[str]:
    """Say which differences the tests can detect, and warn of unequal seeds; `in_full`, also explain the columns."""
    metric, signatures = comparison["metric"], comparison["signatures"]
    higher, lower = ([METRICS[name].heading for name in signatures if sign_of(name) == sign] for sign in (1, -1))
    text = TEMPLATES.get_template("notes.txt").render(
        comparison=comparison,
        in_full=in_full,
        heading=METRICS[metric].heading,
        show=columns.score_decimals(metric),
        sizes=[row["detectable"] for row in comparison["differences"]],
        higher=higher,
        lower=lower,
        significant=SIGNIFICANT,
        median=median,
        duration=human_duration,
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _text_table(comparison: Comparison, key: str, shown: Sequence[Column], render: Render) -> str:
    """Format the rows of a comparison. The difference has a spread after ±, and so have all scores in the table of
    runs, and the metric that ranks in the others."""
    metric = comparison["metric"]
    joined = {*METRICS, "difference"} if key == "runs" else {metric, "difference"}
    rows = []
    for row in comparison[key]:
        cells = {column.key: columns.cell(row, column, metric) for column in shown if column.key in joined}
        rows.append({**row, **{name: str(cell) for name, cell in cells.items() if cell is not None}})
    shows: dict[str, Callable[[Any], str]] = dict.fromkeys(joined, str)
    shows["p"] = lambda p: f"{columns.p_value(p)}{'*' * (p < SIGNIFICANT)}"
    return render(rows, [Column(column.key, column.heading, shows.get(column.key, column.show)) for column in shown])


def _csv(comparison: Comparison, key: str) -> str:
    """Format rows as CSV, without lists and mappings, which are the data of charts. All seeds stand in one cell."""
    shared = {name: comparison[name] for name in ("split", "baseline") if name == "split" or key != "differences"}
    lines = []
    for row in comparison[key]:
        joined = {name: " ".join(map(str, value)) if name == "seeds" else value for name, value in row.items()}
        plain = {name: value for name, value in joined.items() if not isinstance(value, list | dict)}
        lines.append({**shared, **plain})
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0] if lines else shared, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def page(comparison: Comparison, pictures: Mapping[str, Picture]) -> str:
    """Render the comparison as one self-contained HTML file."""
    numbers = {system["name"]: rank for rank, system in enumerate(comparison["systems"])}
    return TEMPLATES.get_template("page.html").render(
        comparison=comparison,
        theme=THEME,
        headings={name: metric.heading for name, metric in METRICS.items()},
        system_table=_page_table(comparison, "systems", columns.system_columns(comparison)),
        run_table=_page_table(comparison, "runs", columns.run_columns(comparison)),
        difference_table=_page_table(comparison, "differences", columns.difference_columns(comparison)),
        notes=notes(comparison),
        numbers=numbers,
        marks={name: key(rank) for name, rank in numbers.items()},
        charts=[picture.inline() for picture in pictures.values()],
        examples=[{**example, "words": _common_source(example)} for example in comparison["examples"]],
    )


def breakable(name: str) -> Markup:
    """Allow line breaks between the parts of a name such as attention/score=dot."""
    return Markup("<wbr>").join(re.split(r"(?<=[/=.,_])", name))


TEMPLATES.filters["breakable"] = breakable


def _page_table(comparison: Comparison, key: str, shown: Sequence[Column]) -> dict[str, Any]:
    """Format a table for the page: its headings, and its rows as (system, cells)."""
    metric = comparison["metric"]
    rows = [
        (row.get("name", row.get("system")), [columns.cell(row, column, metric) or UNKNOWN for column in shown])
        for row in comparison[key]
    ]
    headings = []
    for index, column in enumerate(shown):
        cells = [cells[index] for _, cells in rows]
        headings.append(
            {
                "key": column.key,
                "text": column.heading,
                "numeric": all(cell.value is None or isinstance(cell.value, int | float) for cell in cells),
                "spread_width": max((len(cell.spread or "") for cell in cells), default=0),  # characters
                # A click on the heading puts the best scores and the largest speeds first.
                "descending": column.key in columns.SPEEDS
                or sign_of(metric if column.key in columns.OF_METRIC else column.key) > 0,
            }
        )
    return {"headings": headings, "rows": rows}


def _common_source(example: Mapping[str, Any]) -> list[str] | None:
    """Return the source words as most systems segment them; None if no system has an alignment."""
    alignments = [translation["alignment"] for translation in example["translations"]]
    sources = Counter(tuple(alignment["source"]) for alignment in alignments if alignment)
    return list(sources.most_common(1)[0][0]) if sources else None
