"""Gather what is compared, and write the comparison: Markdown, CSV, JSON and a page."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nmt.compare.compare import ALL, compare, find, group
from nmt.compare.entry import Entry, HeldOut, find_runs, read_run, read_systems
from nmt.compare.jobs import planned_jobs
from nmt.compare.page import page
from nmt.compare.tables import csv_files, text
from nmt.config.errors import UserError, nearest
from nmt.config.overrides import user_path
from nmt.system import text_table as table
from nmt.system.files import to_json, write_atomically

log = logging.getLogger(__name__)


def gather(
    runs: Sequence[str], systems: Sequence[str], split: str, separate_incomparable: bool
) -> list[tuple[list[Entry], HeldOut]]:
    """The outputs to compare, with their test set: one group, or with `separate_incomparable` one for each test set.

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
    """A sentence for each sweep among the folders named that has fewer runs here than jobs."""
    runs = [Path(entry.name).resolve() for entry in entries if entry.config]
    sentences = []
    for name in names:
        folder = user_path(name).resolve()
        done, jobs = sum(folder in run.parents for run in runs), planned_jobs(folder)
        if done < jobs:
            sentences.append(f"{name}: unfinished: {jobs - done} of {jobs} runs are missing.")
    return sentences


def write_comparison(
    runs: Sequence[str],
    output: Path,
    *,
    systems: Sequence[str] = (),
    split: str = "test",
    baseline: str | None = None,
    separate_incomparable: bool = False,
    markdown: bool = False,
    **settings: Any,  # noqa: ANN401
) -> str:
    """Compare, write all files to `output`, and return the tables to print. `settings` are those of `compare`.

    `baseline` names a system or a run, or is "all" for all pairs. Raises UserError if it is unknown, and for the errors
    of `gather` and `compare`.
    """
    groups = [(group(entries), held_out) for entries, held_out in gather(runs, systems, split, separate_incomparable)]
    bases = [baseline if baseline in (None, ALL) else find(baseline, members) for members, _ in groups]
    if baseline is not None and not any(bases):
        names = [system.name for members, _ in groups for system in members]
        raise UserError(f"baseline={baseline}: not one of {', '.join(names)}{nearest(baseline, names)}")
    comparisons = [
        compare(members, held_out, split, baseline=base, **settings)
        for (members, held_out), base in zip(groups, bases, strict=True)
    ]
    missing = unfinished_sweeps(runs, [entry for members, _ in groups for each in members for entry in each.entries])
    comparisons = [{**comparison, "missing": missing} for comparison in comparisons]
    write_atomically(output / "comparison.json", to_json({"comparisons": comparisons}, indent=1).encode())
    for name, content in csv_files(comparisons).items():
        write_atomically(output / name, content.encode())
    write_atomically(output / "comparison.md", f"{text(comparisons, table.markdown, in_full=True)}\n".encode())
    write_atomically(output / "index.html", page(comparisons).encode())
    return text(comparisons, table.markdown if markdown else table.terminal)
