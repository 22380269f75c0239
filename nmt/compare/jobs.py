"""The jobs of a sweep: their names, records of failures, the table of all jobs, the comparison of finished jobs."""

import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.compare.entry import planned_jobs
from nmt.config.checks import config_dir
from nmt.config.errors import UserError, override_values, printable
from nmt.evaluate.metrics import METRICS
from nmt.system import text_table as table
from nmt.system.files import folders_with, short_name, to_json, write_atomically
from nmt.system.run import ERROR, FINISHED, LOCK, SWEEP, RunDirectory, load_values, read_json
from nmt.system.text_table import Column, decimals

MAX_VALUE, MAX_NAME = 40, 200  # characters of one value, and of the whole name of a job's directory
log = logging.getLogger(__name__)


def job_name(overrides: Sequence[str], *varied: str) -> str:
    """Return a directory name such as attention-bahdanau_lr-0.003, which needs no quotes in a shell.

    Where characters are replaced or cut off, a hash is appended, so that names stay distinct.
    """
    values = override_values(overrides)
    ends = [key.rpartition(".")[2] for key in varied]
    names = [key if ends.count(end) > 1 else end for key, end in zip(varied, ends, strict=True)]
    parts = [
        f"{short_name(name, MAX_VALUE)}-{short_name(str(values.get(key)), MAX_VALUE)}"
        for key, name in zip(varied, names, strict=True)
    ]
    return short_name("_".join(parts), MAX_NAME)


def mark_sweep(directory: Path, jobs: int) -> None:
    """Write the file that marks a sweep's directory and holds the number of its jobs (0: unknown), unless an earlier
    start has left a larger number there."""
    if jobs > planned_jobs(directory):
        write_atomically(directory / SWEEP, f"{jobs}\n".encode())
    else:
        (directory / SWEEP).touch()


def record_failure(directory: Path, message: str, overrides: Sequence[str]) -> None:
    """Write error.txt: the message in the first line, the job's overrides in the second, then the traceback."""
    line = "; ".join(message.splitlines())
    with suppress(OSError):  # the disk may be full
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR).write_text(f"{line}\n{shlex.join(overrides)}\n\n{traceback.format_exc()}", encoding="utf-8")


def report_jobs(sweep: Path, searched: bool) -> int:
    """Print and write the table of all jobs, and compare the finished ones; after a search (`searched`), on the
    validation set, as the test set must not choose between runs. Returns the exit status."""
    from nmt.compare.report import write_comparison

    rows = _jobs(sweep)
    if not rows:
        return 0
    metrics = {row["metric"] for row in rows} - {None}
    heading = METRICS[metrics.pop()].heading if len(metrics) == 1 else "score"
    columns = [
        Column("job", "job"),
        *([Column("values", "values")] if all(row["job"].isdigit() for row in rows) else []),
        Column("status", "status"),
        Column("validation", f"validation {heading}", decimals(2)),
        Column("test", f"test {heading}", decimals(2)),
        Column("seconds", "training time", table.human_duration),
        Column("directory", "directory"),
    ]
    print(table.terminal(rows, columns))
    failures = [row for row in rows if row["error"]]
    for row in failures:
        failed = row["status"] == "failed"
        details = f" ({row['directory']}/{ERROR})" if failed else ""
        print(printable(f"nmt-train: error: {row['job']}: {row['error']}{details}"), file=sys.stderr)
        if not failed:  # the run had finished at an earlier start: only the repeated start failed
            (sweep / row["job"] / ERROR).unlink(missing_ok=True)
    write_atomically(sweep / "jobs.json", to_json({"jobs": rows}, indent=2).encode())
    write_atomically(sweep / "jobs.md", f"{table.markdown(rows, columns)}\n".encode())
    finished = [row["directory"] for row in rows if row["status"] == FINISHED]
    split = "validation" if searched or all(row["test"] is None for row in rows) else "test"
    if len(finished) > 1:
        log.info("comparing %d runs on the %s set", len(finished), split)
        defaults = load_values(config_dir() / "compare.yaml")
        keys = ("examples", "sentences", "bootstrap_samples", "randomisation_trials")
        settings = {key: defaults[key] for key in keys}
        try:
            print(f"\n{write_comparison(finished, sweep / 'comparison', split=split, **settings)}")
            print(f"page: {os.path.relpath(sweep / 'comparison' / 'index.html')}")
        except UserError as error:
            log.warning("not compared: %s", error)
    print(f"tensorboard: tensorboard --logdir {shlex.quote(os.path.relpath(sweep))} --host localhost")
    print(f"sweep: {os.path.relpath(sweep)}")
    return 2 if failures else 0


def _jobs(sweep: Path) -> list[dict[str, Any]]:
    """List the jobs: status, scores, seconds of training, directory, error, and the values that differ between jobs."""
    paths = sorted(
        folders_with(sweep, "config.yaml", ERROR, LOCK),
        # Job 2 comes before job 10.
        key=lambda path: [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))],
    )
    overrides = [RunDirectory(path).overrides() for path in paths]
    keys = {key for values in overrides for key in values}
    varied = sorted(key for key in keys if len({str(values.get(key)) for values in overrides}) > 1)
    shown = [" ".join(f"{key}={table.short(of[key])}" for key in varied if key in of) for of in overrides]
    return [{**_job(sweep, path), "values": values} for path, values in zip(paths, shown, strict=True)]


def _job(sweep: Path, path: Path) -> dict[str, Any]:
    run = RunDirectory(path)
    manifest, results = read_json(run.manifest), read_json(run.results)
    training = manifest.get("training", {})
    metric = load_values(run.config)["evaluation"]["metrics"][0] if run.config.is_file() else None
    error = None
    if (path / ERROR).exists():
        error = (path / ERROR).read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    # A finished run stays finished if a later start fails, e.g. with another configuration.
    status = manifest.get("status") or ("failed" if error else "stopped")
    return {
        "job": str(path.relative_to(sweep)),
        "status": status,
        "metric": metric,
        "validation": training.get(f"best_{metric}", results.get("validation", {}).get(metric)),
        "test": results.get("test", {}).get(metric) if status == FINISHED else None,
        "seconds": training.get("seconds"),
        "directory": os.path.relpath(path),
        "error": error,
    }
