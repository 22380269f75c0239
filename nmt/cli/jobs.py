"""What became of a sweep: the table of its jobs, and the comparison of those that have finished."""

import logging
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from nmt.cli.optuna_sweeper import JOURNAL
from nmt.config.compose import config_dir, load_values
from nmt.config.errors import UserError, printable
from nmt.report.table import short
from nmt.run import ERROR, FINISHED, LOCK, RunDirectory, read_json, runs_below

log = logging.getLogger(__name__)


def jobs(sweep: Path) -> list[dict[str, Any]]:
    """What became of each job: status, scores, seconds of training, directory, and the error of one that failed."""
    begun = {path.parent for name in (ERROR, LOCK) for path in sweep.rglob(name)}
    paths = sorted({*runs_below(sweep), *begun}, key=_natural)
    given = [RunDirectory(path).overrides() for path in paths]
    varied = sorted({key for each in given for key in each if len({str(other.get(key)) for other in given}) > 1})
    return [
        {**_job(sweep, path), "values": " ".join(f"{key}={short(each[key])}" for key in varied if key in each)}
        for path, each in zip(paths, given, strict=True)
    ]


def _job(sweep: Path, path: Path) -> dict[str, Any]:
    run = RunDirectory(path)
    manifest, results = read_json(run.manifest), read_json(run.results)
    training = manifest.get("training", {})
    error = (
        (path / ERROR).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        if (path / ERROR).exists()
        else None
    )
    # A start that was refused, as of other values, leaves a finished run finished.
    status = manifest.get("status") or ("failed" if error else "stopped")
    return {
        "job": str(path.relative_to(sweep)),
        "status": status,
        "validation": training.get("best_bleu", results.get("validation", {}).get("bleu")),
        "test": results.get("test", {}).get("bleu") if status == FINISHED else None,
        "seconds": training.get("seconds"),
        "directory": os.path.relpath(path),
        "error": error,
    }


def _comparison_settings() -> dict[str, Any]:
    """What nmt-compare does by default."""
    values = load_values(config_dir() / "compare.yaml")
    return {key: values[key] for key in ("examples", "sentences", "bootstrap_samples", "randomisation_trials")}


def _natural(path: Path) -> list[tuple[int, str]]:
    """2 before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def tell(sweep: Path) -> int:
    """Print and write the table of all jobs, and compare those that have finished. Returns the exit status."""
    from nmt.comparison.report import write_comparison
    from nmt.files import to_json, write_atomically
    from nmt.report import table
    from nmt.report.table import Column, decimals

    rows = jobs(sweep)
    if not rows:
        return 0
    columns = [
        Column("job", "job"),
        *([Column("values", "values")] if all(row["job"].isdigit() for row in rows) else []),
        Column("status", "status"),
        Column("validation", "validation BLEU", decimals(2)),
        Column("test", "test BLEU", decimals(2)),
        Column("seconds", "training time", table.human_duration),
        Column("directory", "directory"),
    ]
    print(table.terminal(rows, columns))
    failures = [row for row in rows if row["error"]]
    for row in failures:
        failed = row["status"] == "failed"
        details = f" ({row['directory']}/{ERROR})" if failed else ""
        print(printable(f"nmt-train: error: {row['job']}: {row['error']}{details}"), file=sys.stderr)
        if not failed:
            (sweep / row["job"] / ERROR).unlink(missing_ok=True)  # of this start, not of the finished run
    write_atomically(sweep / "jobs.json", to_json({"jobs": rows}, indent=2).encode())
    write_atomically(sweep / "jobs.md", f"{table.markdown(rows, columns)}\n".encode())
    finished = [row["directory"] for row in rows if row["status"] == FINISHED]
    # What is chosen from a search must not be chosen by the test set.
    searched = (sweep / JOURNAL).exists()
    split = "validation" if searched or all(row["test"] is None for row in rows) else "test"
    if len(finished) > 1:
        log.info("comparing %d runs on the %s set", len(finished), split)
        try:
            print(f"\n{write_comparison(finished, sweep / 'comparison', **_comparison_settings() | {'split': split})}")
            print(f"page: {os.path.relpath(sweep / 'comparison' / 'index.html')}")
        except UserError as error:
            log.warning("not compared: %s", error)
    print(f"tensorboard: tensorboard --logdir {shlex.quote(os.path.relpath(sweep))} --host localhost")
    print(f"sweep: {os.path.relpath(sweep)}")
    return 2 if failures else 0
