"""Write a comparison: Markdown, CSV, JSON and a page, beside a published finding; and tables for the terminal."""

import csv
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmt.comparison.compare import Comparison, compare, find, group
from nmt.comparison.entry import Entry, HeldOut, find_runs, read_run, read_systems
from nmt.comparison.finding_report import check_finding, write_finding
from nmt.comparison.findings import find_finding
from nmt.config.errors import UserError, nearest
from nmt.files import to_json, write_atomically
from nmt.report import table
from nmt.report.page import EXPLAINED, EXPLAINED_COLUMNS, NAMES, SIGNIFICANT, page, with_interval
from nmt.report.table import Column, decimals

log = logging.getLogger(__name__)
EXPLANATION = (
    "Kendall's tau: of attention weights and gradients (saliency), by source token. AER %: of the links that each of "
    "them and both together give. area: under the curve of an output token's probability while source tokens are "
    "masked in that order; the smaller against random, the better the explanation."
)
Render = Callable[[Sequence[Mapping[str, object]], Sequence[Column]], str]


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


def write_comparison(
    runs: Sequence[str],
    output: Path,
    *,
    systems: Sequence[str] = (),
    split: str = "test",
    baseline: str | None = None,
    separate_incomparable: bool = False,
    finding: str | None = None,
    markdown: bool = False,
    **settings: Any,  # noqa: ANN401
) -> str:
    """Compare, write all files to `output`, and return the tables to print. `settings` are those of `compare`.

    `baseline` names a system or a run, `finding` a finding of a paper to check (nmt/comparison/findings.py). Raises
    UserError if one is unknown, and for the errors of `gather` and `compare`.
    """
    if finding is not None:
        find_finding(finding)  # before anything is read
    groups = [(group(entries), held_out) for entries, held_out in gather(runs, systems, split, separate_incomparable)]
    if finding is not None and len(groups) > 1:
        raise UserError(f"finding={finding}: the runs have several test sets; compare those of one")
    bases = [None if baseline is None else find(baseline, members) for members, _ in groups]
    if baseline is not None and not any(bases):
        names = [system.name for members, _ in groups for system in members]
        raise UserError(f"baseline={baseline}: not one of {', '.join(names)}{nearest(baseline, names)}")
    comparisons = [
        compare(members, held_out, split, baseline=base, **settings)
        for (members, held_out), base in zip(groups, bases, strict=True)
    ]
    write_atomically(output / "comparison.json", to_json({"comparisons": comparisons}, indent=1).encode())
    write_atomically(output / "comparison.csv", _csv(comparisons).encode())
    write_atomically(output / "comparison.md", f"{_text(comparisons, table.markdown, with_runs=True)}\n".encode())
    write_atomically(output / "index.html", page(comparisons).encode())
    text = _text(comparisons, table.markdown if markdown else table.terminal)
    if finding is None:
        return text
    ((members, held_out),), (comparison,) = groups, comparisons
    return f"{text}\n\n{write_finding(check_finding(finding, members, held_out, comparison), output)}"


def _text(comparisons: Sequence[Comparison], render: Render, with_runs: bool = False) -> str:
    parts = []
    for comparison in comparisons:
        title = f"{comparison['split']}: {comparison['sentences']} sentences, {comparison['signature']}"
        title += "" if comparison["metric"] == "bleu" else f"; ranked by {NAMES[comparison['metric']]}"
        rows = _system_rows(comparison)
        parts += [title, render(rows, _system_columns(rows, comparison["metric"]))]
        if _with_values(EXPLAINED, rows):
            parts += ["what attention explains:", render(rows, _with_values(EXPLAINED_COLUMNS, rows))]
            parts += [EXPLANATION] if with_runs else []
        if with_runs:
            parts += [render(comparison["runs"], _run_columns(comparison["runs"])), _notes(comparison)]
    return "\n\n".join(parts)


def _notes(comparison: Comparison) -> str:
    samples, trials = comparison["bootstrap_samples"], comparison["randomisation_trials"]
    metric = NAMES[comparison["metric"]]
    return (
        "± after a mean: standard deviation over seeds; after a single score: half the width of its 95 % bootstrap "
        "interval. 95 %: half the width of the 95 % bootstrap interval, the mean over seeds. p: probability of a "
        f"difference in {metric} from {comparison['baseline']} at least this large if both systems were equally good, "
        f"by paired bootstrap ({samples} samples) and paired approximate randomisation ({trials} trials); the largest "
        f"p of the seeds, or 1 if some seeds gain and others lose; * below {SIGNIFICANT}, not corrected for the "
        "number of systems."
    )


def _system_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows of the table of systems, with the values that only it shows."""
    return [
        {
            **row,
            "longest": row["bleu_by_length"][-1]["bleu"],
            "count": len(row["seeds"]) or None,
            "scores": f"{row['bleu']:.2f}" + (f" ± {row['bleu_sd']:.2f}" if row["bleu_sd"] is not None else ""),
        }
        for row in comparison["systems"]
    ]


def _system_columns(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Column]:
    from_words, to_words = rows[0]["bleu_by_length"][-1]["words"]
    columns = [
        Column("rank", "#"),
        Column("name", "system"),
        Column("count", "seeds"),
        Column("scores", "BLEU"),
        Column("chrf", "chrF", decimals(2)),
        Column("ter", "TER", decimals(2)),
        Column("comet", "COMET", decimals(4)),
        Column("aer", "AER %", decimals(1)),
        Column("longest", f"BLEU, length {from_words}-{to_words}", decimals(2)),
        Column("p_bootstrap", "p, bootstrap", _starred_p),
        Column("p_randomisation", "p, randomisation", _starred_p),
        Column("parameters", "parameters", table.human_count),
        Column("epoch_seconds", "s/epoch", decimals(1)),
        Column("seconds", "training time", table.human_duration),
        Column("tokens_per_second", "tokens/s", "{:,.0f}".format),
        Column("sentences_per_second", "sentences/s", "{:,.0f}".format),
    ]
    return _with_values(with_interval(columns, metric), rows)


def _run_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [Column("run", "run"), Column("system", "system"), Column("seed", "seed")]
    for metric, heading in NAMES.items():
        show = decimals(4 if metric == "comet" else 2)
        columns += [Column(metric, heading, show), Column(f"{metric}_ci", "±", show)]
    columns += [
        Column("aer", "AER %", decimals(1)),
        Column("p_bootstrap", "p, bootstrap", _starred_p),
        Column("p_randomisation", "p, randomisation", _starred_p),
        *EXPLAINED,
    ]
    return _with_values(columns, rows)


def _with_values(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [column for column in columns if any(row.get(column.key) is not None for row in rows)]


def _starred_p(value: float) -> str:
    """A p value, with a star if it is significant."""
    return f"{value:.4f}{'*' if value < SIGNIFICANT else ''}"


def _csv(comparisons: Sequence[Comparison]) -> str:
    """One line per run."""
    file = io.StringIO()
    writer = csv.DictWriter(file, ["split", "baseline", *comparisons[0]["runs"][0]], lineterminator="\n")
    writer.writeheader()
    for comparison in comparisons:
        shared = {key: comparison[key] for key in ("split", "baseline")}
        writer.writerows({**shared, **row} for row in comparison["runs"])
    return file.getvalue()
