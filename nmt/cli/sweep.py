"""Sweeps: each job has a directory named by its values. A failure is recorded there, and the other jobs continue."""

import io
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from nmt.cli import optuna_sweeper
from nmt.cli.app import STOPPED, log_to_stream
from nmt.cli.compose import SEARCH_PATH, compose, explained, hydra_of, of_job
from nmt.cli.explain import explain
from nmt.compare.jobs import mark_sweep, record_failure, report_jobs
from nmt.config.compose import config_dir
from nmt.config.errors import UserError, for_shell, format_value, override_values, plain_value, quoted, user_path
from nmt.config.schema import TrainConfig
from nmt.system.files import folders_with, short_name
from nmt.system.processes import cores, end_with, join_cluster, rank
from nmt.system.run import ERROR, LOCK, SWEEP, RunDirectory, read_json

MAX_WAIT = 30.0  # seconds for a run to save and stop
MAX_VALUE, MAX_NAME = 40, 200  # characters of one value, and of the whole name of a job's directory
COUNT = "NMT_SWEEP_JOBS"  # environment variable with the number of jobs, which worker processes inherit
PARENT = os.getppid()  # id of the parent process, which for a worker of the parallel launcher is the sweep
BUSY = threading.Event()  # set while this process runs a job
# Directory of the sweep in progress, and whether the sweep has created it; empty in worker processes.
_started: list[tuple[Path, bool]] = []
log = logging.getLogger(__name__)
observer = optuna_sweeper.observer


def prepare(config: DictConfig, words: Sequence[str]) -> list[str]:
    """Check a sweep, mark its directory, and name the directory of each job by the values that the sweep varies.

    `config` is composed from those words that have a single value. Returns the words for Hydra. Raises UserError.
    """
    sweeper, launcher = config.hydra.sweeper, config.hydra.launcher
    is_grid = "BasicSweeper" in sweeper._target_
    directory = user_path(config.hydra.sweep.dir)
    with explained("train", words), hydra_of("train"):  # so that the parser knows the choices that glob(...) stands for
        overrides = _by_key([*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *words])
        varied = [key for key, override in overrides.items() if override.is_sweep_override()]
        discrete = {key: override for key, override in overrides.items() if override.is_discrete_sweep()}
        values = {key: list(override.sweep_string_iterator()) for key, override in discrete.items()}
    # In the names of directories, keys without a dot (such as groups) come first and the seed comes last.
    varied.sort(key=lambda key: (key == "seed", "." in key))
    _refuse(directory, overrides, values, is_grid)
    _refuse_hopeless(overrides, values)
    _started[:] = [(directory, not os.path.lexists(directory))]
    directory.mkdir(parents=True, exist_ok=True)
    count = math.prod(map(len, values.values()))
    mark_sweep(directory, count if is_grid else 0)
    os.environ[COUNT] = str(count if is_grid else sweeper.get("n_trials"))
    if launcher.get("n_jobs") and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, partial(_interrupt_after_saving, directory))
    own = [f"hydra.sweep.dir={quoted(directory)}"]
    if is_grid and varied and "hydra.sweep.subdir" not in overrides:
        own.append(f"hydra.sweep.subdir='${{job_name:${{hydra.overrides.task}},{','.join(varied)}}}'")
    return [*(word for word in words if not word.startswith("hydra.sweep.dir=")), *own]


def _by_key(words: Sequence[str]) -> dict[str, Override]:
    """Parse overrides, by key. A later override of a key replaces an earlier one."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return {override.get_key_element().lstrip("+"): override for override in parser.parse_overrides([*words])}


def _refuse(directory: Path, overrides: dict[str, Override], values: dict[str, list[str]], is_grid: bool) -> None:
    """Raise UserError for settings of a sweep that would be ignored or fail."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / SWEEP).is_file():
        raise UserError(f"{directory}: is not empty and not a sweep; choose another hydra.sweep.dir")
    if "run" in overrides:
        raise UserError("run=: resumes a single run; resume a sweep with hydra.sweep.dir=DIR")
    if "hydra.run.dir" in overrides:
        line = overrides["hydra.run.dir"].input_line
        raise UserError(f"{line}: sets the directory of a single run; that of a sweep is hydra.sweep.dir")
    for key, texts in values.items():
        if not texts:
            raise UserError(f"{key}: no values, so there is no job to run")
        value, count = Counter(map(plain_value, texts)).most_common(1)[0]
        if count > 1:
            name = format_value(value)
            raise UserError(f"{key}: the sweep has the value {name} several times; name each value once")
    intervals = [each.input_line for each in overrides.values() if isinstance(each.value(), IntervalSweep)]
    if intervals and is_grid:
        raise UserError(f"{intervals[0]}: interval(a,b) is for a search: add hydra/sweeper=optuna")
    if "experiment" in values:
        _refuse_nested_sweeps(overrides)


def _refuse_nested_sweeps(overrides: dict[str, Override]) -> None:
    recipes = str(overrides["experiment"].input_line)
    folders = [config_dir()]
    if SEARCH_PATH in overrides:
        folders += [Path(str(folder)) for folder in cast(list[object], overrides[SEARCH_PATH].value())]
    paths = [path for folder in folders for path in (folder / "experiment").rglob("*.yaml") if path.stem in recipes]
    if any("MULTIRUN" in path.read_text(encoding="utf-8", errors="replace") for path in paths):
        raise UserError("experiment: one of these recipes is itself a sweep, which cannot be part of another")


def _refuse_hopeless(overrides: dict[str, Override], values: dict[str, list[str]]) -> None:
    """Compose the first job and the last one. Raises UserError if both are refused: what they share must be wrong."""
    errors = []
    for end in (0, -1):
        words = [_at_end(override, values.get(key), end) for key, override in overrides.items()]
        search_path = [word for word in words if word.startswith(SEARCH_PATH)]
        try:
            compose("train", TrainConfig, [*of_job(words), *search_path])
        except UserError as error:
            errors.append(error)
    if len(errors) > 1:
        raise errors[0]


def _at_end(override: Override, values: list[str] | None, end: int) -> str:
    """Return an override with the first (0) or the last (-1) of its values."""
    if not override.is_sweep_override():
        return override.input_line or ""
    value = override.value()
    texts = [str(value.start), str(value.end)] if isinstance(value, IntervalSweep) else values or [""]
    return f"{override.get_key_element()}={texts[end]}"


def _interrupt_after_saving(sweep: Path, *_: object) -> None:
    """At Ctrl-C, wait until the workers have saved checkpoints: at KeyboardInterrupt, the launcher kills them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the waiting
    if not BUSY.is_set():
        for folder in folders_with(sweep, LOCK):
            RunDirectory(folder).wait_until_free(MAX_WAIT)
    raise KeyboardInterrupt


def job_name(overrides: list[str] | ListConfig, *varied: str) -> str:
    """Return a directory name such as attention-bahdanau_lr-0.003, which needs no quotes in a shell.

    Where characters are replaced or cut off, a hash is appended, so that names stay distinct.
    """
    plain = OmegaConf.to_container(overrides, resolve=False) if isinstance(overrides, ListConfig) else overrides
    values = override_values(cast(list[str], plain))
    ends = [key.rpartition(".")[2] for key in varied]
    names = [key if ends.count(end) > 1 else end for key, end in zip(varied, ends, strict=True)]
    parts = [
        f"{short_name(name, MAX_VALUE)}-{short_name(str(values.get(key)), MAX_VALUE)}"
        for key, name in zip(varied, names, strict=True)
    ]
    return short_name("_".join(parts), MAX_NAME)


# Registered at import, because a launcher's worker process imports modules but runs no `main`.
OmegaConf.register_new_resolver("job_name", job_name, replace=True)


def job_words() -> list[str]:
    """Return the overrides of this job, with their references unresolved."""
    return cast(list[str], OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))


def job_threads() -> int | None:
    """Return the number of threads of each job, so that parallel jobs share the cores; None for PyTorch's default."""
    launcher = HydraConfig.get().launcher
    jobs: int | None = launcher.get("n_jobs")
    if jobs is not None:
        return max(1, cores() // (jobs if jobs > 0 else cores()))
    threads: int | None = launcher.get("cpus_per_task")
    return threads


def run_job(work: Callable[[Path], int]) -> Any:  # noqa: ANN401
    """Run one job of a sweep. An error is recorded in the job's directory, and the sweep continues.

    Returns a result for the sweeper: the best validation score, None after an error, or the name of the signal that
    stopped the job.
    """
    join_cluster()
    hydra_config = HydraConfig.get()
    directory = Path(hydra_config.runtime.output_dir)
    in_worker = not _started  # only the sweep's own process fills `_started`; without workers it runs the jobs itself
    if rank() == 0:
        (directory / ERROR).unlink(missing_ok=True)
    with _running(directory.name, in_worker):
        number, count = hydra_config.job.num + 1, os.environ.get(COUNT)
        log.info("\njob %s%s: %s", number, f" of {count}" if count else "", directory.name)
        try:
            status = work(directory)
        except Exception as error:
            message = explain(error, "train", job_words())
            if rank() == 0:
                record_failure(directory, message, job_words())
            log.error("%s: failed: %s", directory.name, message)
            return None
        if rank() == 0:
            (directory / ERROR).unlink(missing_ok=True)  # another sweep may have written it while this job was running
        if status >= STOPPED:
            if in_worker:
                return signal.Signals(status - STOPPED).name
            option = for_shell("hydra.sweep.dir", os.path.relpath(hydra_config.sweep.dir))
            log.info("to resume the sweep, run the same command with %s", option)
            sys.exit(status)  # the signal ends the whole sweep
    return best_score(RunDirectory(directory))


def best_score(run: RunDirectory) -> float | None:
    """Return the best validation score of a finished run, as measured by its `validation.monitor`."""
    training: dict[str, Any] = read_json(run.manifest).get("training", {})
    return next((value for key, value in training.items() if key.startswith("best_") and key != "best_step"), None)


@contextmanager
def _running(name: str, in_worker: bool) -> Iterator[None]:
    """Set BUSY in the context. In a worker, also put the job's name before lines of standard error.

    A worker ends when the process of its sweep has ended.
    """
    stderr = sys.stderr
    BUSY.set()
    if in_worker:
        # This stream is not a terminal, so that no progress bars are shown: those of several jobs would collide.
        sys.stderr = _Prefixed(stderr, name)
        log_to_stream(sys.stderr)
        if HydraConfig.get().launcher.get("n_jobs"):  # parallel launcher: PARENT is the sweep (on a cluster it is not)
            _watch_the_sweep()
    try:
        yield
    finally:
        sys.stderr = stderr
        BUSY.clear()
        if in_worker and HydraConfig.get().launcher.get("n_jobs") and os.getppid() != PARENT:
            os._exit(1)  # the sweep's process was killed


@cache
def _watch_the_sweep() -> None:
    end_with(PARENT)


class _Prefixed(io.TextIOBase):
    """A stream that writes a job's name before each line, and is not a terminal."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        self._stream.write("".join(f"[{self._name}] {line}\n" for line in text.splitlines()) if text.strip() else "")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def finish() -> int:
    """Report a sweep after its last job, or after its launcher failed. Returns the exit status."""
    if not _started:
        return 0  # not a sweep
    directory, created = _started.pop()
    if not directory.is_dir():
        return 0
    status = report_jobs(directory, (directory / optuna_sweeper.JOURNAL).exists())
    if created and {path.name for path in directory.iterdir()} <= {SWEEP, "multirun.yaml"}:  # no job started
        shutil.rmtree(directory)
    return status
