"""Sweeps: a directory for each combination, named by what it varies; failures recorded; a table at the end."""

import logging
import math
import os
import re
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from signal import SIGTERM
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from nmt.cli import optuna_sweeper
from nmt.cli.app import explain, log_to, output_dir
from nmt.config.compose import given_values
from nmt.config.errors import UserError
from nmt.report.table import short
from nmt.run import ERROR, FINISHED, RunDirectory, read_json, runs_below

STOPPED = 128  # plus its number: exit status after a signal
HERE = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # runs the jobs in this process, one by one
LONGEST_VALUE = 40
COUNT = "NMT_SWEEP_JOBS"  # how many there are: an environment variable, which worker processes inherit
log = logging.getLogger(__name__)


class NameJobs(Callback):
    """Hydra calls this before and after the jobs (configs/train.yaml, hydra.callbacks)."""

    directory: Path | None = None  # of the sweep that has come to its end

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:  # noqa: ANN401
        """Let each job's directory be named by the values that the sweep varies, instead of a number."""
        varied, count = _varied(config)
        os.environ[COUNT] = str(count) if varied else ""
        chosen = any(override.startswith("hydra.sweep.subdir=") for override in config.hydra.overrides.hydra)
        if varied and not chosen and config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            with open_dict(config):  # these overrides are what Hydra composes each job from
                keys = ",".join(varied)
                config.hydra.overrides.hydra.append(
                    f"hydra.sweep.subdir='${{job_name:${{hydra.overrides.task}},{keys}}}'"
                )

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:  # noqa: ANN401
        """All jobs have come back."""
        NameJobs.directory = Path(config.hydra.sweep.dir)


def _varied(config: DictConfig) -> tuple[list[str], int]:
    """The keys that take several values in this sweep, and the number of its combinations."""
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    given += config.hydra.overrides.task
    parsed = {override.get_key_element(): override for override in OverridesParser.create().parse_overrides(given)}
    varied = {key: override for key, override in parsed.items() if override.is_sweep_override()}
    several = [override for override in varied.values() if override.is_discrete_sweep()]
    in_order = sorted(varied, key=lambda key: (key == "seed", "." in key))  # groups first, the seed last
    return in_order, math.prod(len(list(override.sweep_string_iterator())) for override in several)


def job_name(overrides: list[str], *varied: str) -> str:
    """Such as attention-bahdanau_lr-0.003: only letters that need no quoting, in any shell or file system."""
    values = given_values(overrides)
    ends = [key.rpartition(".")[2] for key in varied]
    names = [key if ends.count(end) > 1 else end for key, end in zip(varied, ends, strict=True)]
    shown = [f"{name}-{str(values.get(key))[-LONGEST_VALUE:]}" for key, name in zip(varied, names, strict=True)]
    return "_".join(re.sub(r"[^\w.-]+", "-", part) for part in shown)


observer = optuna_sweeper.observer

# At import, since a launcher's worker process imports this module and nothing else of the command.
OmegaConf.register_new_resolver("job_name", job_name, replace=True)


def sweeping() -> bool:
    """Is this one job of several?"""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def job_threads() -> int | None:
    """CPU threads of a job beside others, so that they do not fight for cores; None: as many as torch likes."""
    launcher = HydraConfig.get().launcher
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = launcher.get("n_jobs")
    if beside is not None:
        return max(1, cores // (beside if beside > 0 else cores))
    each: int | None = launcher.get("cpus_per_task")
    return each


def run_job(work: Callable[[], int], command: str) -> Any:  # noqa: ANN401
    """One job of a sweep: whatever goes wrong is recorded in its directory, and the others go on.

    Returns what the sweeper is to know: the best validation score, None without one.
    """
    directory = output_dir()
    here = HydraConfig.get().launcher._target_ == HERE
    (directory / ERROR).unlink(missing_ok=True)
    with nullcontext() if here else _elsewhere(directory.name):
        number, count = HydraConfig.get().job.num + 1, os.environ.get(COUNT)
        log.info("\njob %s%s: %s", number, f" of {count}" if count else "", directory.name)
        try:
            status = work()
        except Exception as error:
            message = explain(error, command)
            (directory / ERROR).write_text(f"{message}\n\n{traceback.format_exc()}", encoding="utf-8")
            log.error("%s: failed: %s", directory.name, message)
            return None
        if status >= STOPPED and here:  # a signal means the whole sweep
            given = f"hydra.sweep.dir={os.path.relpath(HydraConfig.get().sweep.dir)}"
            log.info("go on with the whole sweep: the same command with %s", shlex.quote(given))
            sys.exit(status)
    best: dict[str, Any] = read_json(RunDirectory(directory).manifest).get("training", {})
    return next((value for key, value in best.items() if key in {"best_bleu", "best_loss"}), None)


@contextmanager
def _elsewhere(name: str) -> Iterator[None]:
    """In a launcher's worker: lines on the terminal say which job they are of, and the worker ends with the sweep."""
    before = sys.stderr
    sys.stderr = _Named(before, name)  # no terminal: progress bars of several jobs would overwrite each other
    log_to(sys.stderr)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), SIGTERM)  # the run saves a checkpoint and stops

    if HydraConfig.get().launcher.get("n_jobs"):  # a worker on a cluster has another parent
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        sys.stderr = before


class _Named:
    """A stream that begins each line with the job's name."""

    def __init__(self, stream: Any, name: str) -> None:  # noqa: ANN401
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        self._stream.write("".join(f"[{self._name}] {line}\n" for line in text.splitlines()) if text.strip() else "")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False


def jobs(sweep: Path) -> list[dict[str, Any]]:
    """What became of each job: status, scores, seconds of training, directory, and the error of one that failed."""
    failed = {path.parent for path in sweep.rglob(ERROR)}
    paths = sorted({*runs_below(sweep), *failed}, key=_natural)
    asked = [RunDirectory(path).asked() for path in paths]
    varied = sorted({key for each in asked for key in each if len({str(other.get(key)) for other in asked}) > 1})
    return [
        {**_job(sweep, path), "values": " ".join(f"{key}={short(each[key])}" for key in varied if key in each)}
        for path, each in zip(paths, asked, strict=True)
    ]


def _job(sweep: Path, path: Path) -> dict[str, Any]:
    run = RunDirectory(path)
    manifest, results = read_json(run.manifest), read_json(run.results)
    training = manifest.get("training", {})
    error = (path / ERROR).read_text(encoding="utf-8").partition("\n")[0] if (path / ERROR).exists() else None
    status = "failed" if error else manifest.get("status", "stopped")
    return {
        "job": str(path.relative_to(sweep)),
        "status": status,
        "validation": training.get("best_bleu"),
        "test": results.get("test", {}).get("bleu") if status == FINISHED else None,
        "seconds": training.get("seconds"),
        "directory": os.path.relpath(path),
        "error": error,
    }


def _natural(path: Path) -> list[tuple[int, str]]:
    """2 before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def finish() -> int:
    """Print and write the table of all jobs, and compare those that have finished. Returns the exit status."""
    if NameJobs.directory is None:
        return 0  # Hydra has only shown something, such as --help
    sweep = NameJobs.directory
    from nmt.comparison.report import write_comparison
    from nmt.files import to_json, write_atomically
    from nmt.report import table
    from nmt.report.table import Column, decimals

    rows = jobs(sweep)
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
    write_atomically(sweep / "jobs.json", to_json({"jobs": rows}, indent=2).encode())
    write_atomically(sweep / "jobs.md", f"{table.markdown(rows, columns)}\n".encode())
    failures = [row for row in rows if row["status"] == "failed"]
    for row in failures:
        print(f"nmt-train: error: {row['job']}: {row['error']} ({row['directory']}/{ERROR})", file=sys.stderr)
    finished = [row["directory"] for row in rows if row["status"] == FINISHED and row["test"] is not None]
    if len(finished) > 1:
        try:
            # What is chosen from a search must not be chosen by the test set.
            split = "validation" if (sweep / optuna_sweeper.JOURNAL).exists() else "test"
            print(f"\n{write_comparison(finished, sweep / 'comparison', split=split)}")
            print(f"page: {os.path.relpath(sweep / 'comparison' / 'index.html')}")
        except UserError as error:
            log.warning("not compared: %s", error)
    print(f"tensorboard: tensorboard --logdir {shlex.quote(os.path.relpath(sweep))} --host localhost")
    print(f"sweep: {os.path.relpath(sweep)}")
    return 2 if failures else 0
