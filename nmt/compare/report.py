"""Gather what is compared, and write the comparison: tables, pictures, JSON and a page."""

import csv
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nmt.compare import columns
from nmt.compare.compare import ALL, SIGNIFICANT, Comparison, compare, find, group
from nmt.compare.entry import Entry, HeldOut, find_runs, read_run, read_systems
from nmt.compare.jobs import planned_jobs
from nmt.compare.page import page
from nmt.compare.pictures import draw
from nmt.config.errors import UserError, nearest, printable
from nmt.config.overrides import user_path
from nmt.system import text_table as table
from nmt.system.files import to_json, write_atomically
from nmt.system.text_table import Column

Render = Callable[[Sequence[Mapping[str, object]], Sequence[Column]], str]
log = logging.getLogger(__name__)


def gather(
    runs: Sequence[str], systems: Sequence[str], split: str, separate_incomparable: bool
) -> list[tuple[list[Entry], HeldOut]]:
    """Read the outputs to compare, with their test set: one group, or with `separate_incomparable` one per test set.

    A run without results is left out with a warning if a folder or pattern led to it. Raises UserError if it was named
    itself, and for outputs that cannot be compared.
    """
    groups: list[tuple[list[Entry], HeldOut]] = []
    for path, named in find_runs(runs).items():
        try:
            entry, held_out = read_run(path, split)
        except UserError as error:
            if named:
                raise
            log.warning("left out: %s", error)
            continue
        differences = [held_out.difference(other) for _, other in groups]
        if None in differences:
            groups[differences.index(None)][0].append(entry)
        elif groups and not separate_incomparable:
            first = groups[0][0][0].name
            raise UserError(
                f"{entry.name} and {first} cannot be compared: {differences[0]}; separate_incomparable=true separates "
                "them"
            )
        else:
            groups.append(([entry], held_out))
    if not groups:
        raise UserError(f"runs={','.join(runs)}: no run there has {split} results")
    if systems:
        if len(groups) > 1:
            raise UserError("systems: the runs have several test sets; compare the systems with runs of one")
        entries, held_out = groups[0]
        others = read_systems(systems, held_out)
        if common := {entry.name for entry in entries} & {other.name for other in others}:
            raise UserError(f"systems: {common.pop()} is a run's name; give the system another one")
        entries.extend(others)
    return groups


def unfinished_sweeps(names: Sequence[str], entries: Iterable[Entry]) -> list[str]:
    """Say in a sentence for each sweep among the folders named how many of its jobs have no run here."""
    runs = [Path(entry.name).resolve() for entry in entries if entry.config]
    sentences = []
    for name in names:
        folder = user_path(name).resolve()
        done, jobs = sum(folder in run.parents for run in runs), planned_jobs(folder)
        if done < jobs:
            sentences.append(f"{name}: unfinished: {jobs - done} of {jobs} runs are missing.")
    return sentences


def compare_runs(
    runs: Sequence[str],
    *,
    systems: Sequence[str] = (),
    split: str = "test",
    baseline: str | None = None,
    separate_incomparable: bool = False,
    **settings: Any,  # noqa: ANN401
) -> list[Comparison]:
    """Gather and compare, one comparison for each test set. `settings` are those of `compare`.

    `baseline` names a system or a run, or is "all" for all pairs. Raises UserError if it is unknown, and for the errors
    of `gather` and `compare`.
    """
    groups = [(group(entries), held_out) for entries, held_out in gather(runs, systems, split, separate_incomparable)]
    bases = [baseline if baseline in (None, ALL) else find(baseline, members) for members, _ in groups]
    if baseline is not None and not any(bases):
        names = [system.name for members, _ in groups for system in members]
        raise UserError(f"baseline={baseline}: not one of {', '.join(names)}{nearest(baseline, names)}")
    entries = [entry for members, _ in groups for system in members for entry in system.entries]
    missing = unfinished_sweeps(runs, entries)
    return [
        {**compare(members, held_out, split, baseline=base, **settings), "missing": missing}
        for (members, held_out), base in zip(groups, bases, strict=True)
    ]


def write_comparison(runs: Sequence[str], output: Path, *, markdown: bool = False, **settings: Any) -> str:  # noqa: ANN401
    """Compare as `compare_runs`, write all files to `output`, and return the tables to print."""
    comparisons = compare_runs(runs, **settings)
    write_files(comparisons, output)
    return tables(comparisons, table.markdown if markdown else table.terminal)


def write_files(comparisons: Sequence[Comparison], output: Path) -> None:
    """Write comparison.json, .csv and .md, systems.csv, differences.csv, the pictures and the page to a folder."""
    write_atomically(output / "comparison.json", to_json({"comparisons": comparisons}, indent=1).encode())
    for name, key in {"comparison": "runs", "systems": "systems", "differences": "differences"}.items():
        write_atomically(output / f"{name}.csv", _csv(comparisons, key).encode())
    write_atomically(output / "comparison.md", f"{tables(comparisons, table.markdown, in_full=True)}\n".encode())
    pictures = [draw(comparison, suffix) for suffix, comparison in enumerate(comparisons, 1)]
    for drawn in pictures:
        for picture in drawn.values():
            write_atomically(output / f"{picture.name}.png", picture.png())
            write_atomically(output / f"{picture.name}.svg", picture.svg.encode())
    write_atomically(output / "index.html", page(comparisons, pictures).encode())


def tables(comparisons: Sequence[Comparison], render: Render, in_full: bool = False) -> str:
    """Format the tables of systems with what their tests could show. in_full: all columns, runs and notes as well."""
    parts = []
    for comparison in comparisons:
        metric = comparison["metric"]
        title = f"{comparison['split']}: {comparison['sentences']} sentences, {comparison['signature']}"
        title += "" if metric == "bleu" else f"; ranked by {columns.NAMES[metric]}"
        shown = [
            column for column in columns.system_columns(comparison) if in_full or column.key not in columns.IN_FULL
        ]
        parts += [title, *map(printable, comparison["missing"]), _table(comparison, "systems", shown, render)]
        parts += filter(None, [columns.power(comparison)])
        if explained := columns.explained_columns(comparison):
            parts += ["what attention explains:", _table(comparison, "systems", explained, render)]
            parts += [columns.EXPLANATION] if in_full else []
        if in_full and comparison["baseline"] is None and comparison["differences"]:
            parts += [_table(comparison, "differences", columns.difference_columns(comparison), render)]
        if in_full:
            parts += [_table(comparison, "runs", columns.run_columns(comparison), render)]
            parts += filter(None, [columns.notes_on_scores(comparison), columns.notes_on_costs(comparison)])
    return "\n\n".join(parts)


def _table(comparison: Comparison, key: str, shown: Sequence[Column], render: Render) -> str:
    """Format the rows of a comparison; the standard deviations between seeds have no place beside other means."""
    metric = comparison["metric"]
    joined = {*columns.NAMES, "difference"} if key == "runs" else {metric, "difference"}
    rows, whole = [], []
    for column in shown:
        with_star = Column(column.key, column.heading, partial(_with_star, column.show))
        whole.append(
            Column(column.key, column.heading) if column.key in joined else with_star if column.key == "p" else column
        )
    for row in comparison[key]:
        texts = {column.key: columns.cell(row, column, metric) for column in shown if column.key in joined}
        rows.append({**row, **{name: None if cell is None else str(cell) for name, cell in texts.items()}})
    return render(rows, whole)


def _with_star(show: Callable[[float], str], p: float) -> str:
    return f"{show(p)}{'*' if p < SIGNIFICANT else ''}"


def _csv(comparisons: Sequence[Comparison], key: str) -> str:
    """Format rows without the data of charts; several seeds stand in one cell."""
    shared = ("split",) if key == "differences" else ("split", "baseline")
    lines = []
    for comparison in comparisons:
        for row in comparison[key]:
            joined = {name: " ".join(map(str, value)) if name == "seeds" else value for name, value in row.items()}
            plain = {name: value for name, value in joined.items() if not isinstance(value, list | dict)}
            lines.append({**{name: comparison[name] for name in shared}, **plain})
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0] if lines else shared, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()
