"""Sweeps: each job has a directory named by its values. A failure is recorded there, and the other jobs continue."""

import io
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from nmt.cli import optuna_sweeper
from nmt.cli.app import DEBUG, STOPPED, log_to_stream
from nmt.cli.compose import SEARCH_PATH, explained, hydra_of
from nmt.cli.explain import explain
from nmt.cli.launch import train
from nmt.cli.start import new_run
from nmt.compare.jobs import mark_sweep, record_failure, report_jobs
from nmt.config.compose import config_dir
from nmt.config.errors import UserError, for_shell, override_values, quoted, user_path
from nmt.system.files import folders_with, short_name
from nmt.system.processes import cores, end_with, join_cluster, rank
from nmt.system.run import ERROR, FINISHED, LOCK, PRUNED, SWEEP, RunDirectory, read_json

MAX_WAIT = 30.0  # seconds for a run to save and stop
MAX_VALUE, MAX_NAME = 40, 200  # characters of one value, and of the whole name of a job's directory
COUNT = "NMT_SWEEP_JOBS"  # environment variable with the number of jobs, which worker processes inherit
PARENT = os.getppid()  # id of the parent process, which for a worker of the parallel launcher is the sweep
IN_SWEEP = threading.Event()  # set in the process of the sweep, which runs the jobs itself if there are no workers
BUSY = threading.Event()  # set while this process runs a job
log = logging.getLogger(__name__)


def run_sweep(config: DictConfig, words: Sequence[str]) -> int:
    """Let Hydra run the jobs of a sweep, and report them. Returns the exit status; raises UserError.

    `config` is composed from those words that have a single value.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep cannot run under torchrun; give its jobs several processes with processes=N")
    directory = user_path(config.hydra.sweep.dir)
    created = not os.path.lexists(directory)
    arguments = _prepare(config, directory, words)
    failure = None
    try:
        with explained("train", words):
            call_hydra(["-m", *arguments])
    except UserError as error:  # of a launcher
        failure = error
    status = report_jobs(directory, (directory / optuna_sweeper.JOURNAL).exists())
    if created and {path.name for path in directory.iterdir()} <= {SWEEP, "multirun.yaml"}:  # no job started
        shutil.rmtree(directory)
    if failure is not None:
        raise failure
    return status


def call_hydra(arguments: list[str]) -> None:
    """Let Hydra run jobs, or install its completion in the user's shell."""
    sys.argv[1:] = arguments
    os.environ[DEBUG] = "1"  # otherwise Hydra prints exceptions itself
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(job)()


def _prepare(config: DictConfig, directory: Path, words: Sequence[str]) -> list[str]:
    """Check a sweep, mark its directory, and name the directory of each job by the values that the sweep varies.

    Returns the words for Hydra.
    """
    sweeper, launcher = config.hydra.sweeper, config.hydra.launcher
    is_grid = "BasicSweeper" in sweeper._target_
    given = [*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *words]
    with explained("train", words), hydra_of("train"):  # so that the parser knows the choices that glob(...) stands for
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        overrides = {override.get_key_element(): override for override in parser.parse_overrides(given)}
        values = {key: _values(override) for key, override in overrides.items() if override.is_sweep_override()}
    if directory.is_dir() and any(directory.iterdir()) and not (directory / SWEEP).is_file():
        raise UserError(f"{directory}: is not empty and not a sweep; choose another hydra.sweep.dir")
    if "hydra.run.dir" in overrides:
        line = overrides["hydra.run.dir"].input_line
        raise UserError(f"{line}: sets the directory of a single run; that of a sweep is hydra.sweep.dir")
    if key := next((key for key, texts in values.items() if not texts), None):
        raise UserError(f"{key}: no values, so there is no job to run")
    _refuse_hopeless(overrides, values)
    directory.mkdir(parents=True, exist_ok=True)
    count = math.prod(map(len, values.values()))
    mark_sweep(directory, count if is_grid else 0)
    os.environ[COUNT] = str(count if is_grid else sweeper.get("n_trials"))
    IN_SWEEP.set()
    if launcher.get("n_jobs") and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, partial(_interrupt_after_saving, directory))
    own = [f"hydra.sweep.dir={quoted(directory)}"]
    if is_grid and values and "hydra.sweep.subdir" not in overrides:
        # In the names of directories, keys without a dot (such as groups) come first and the seed comes last.
        varied = sorted(values, key=lambda key: (key == "seed", "." in key))
        own.append(f"hydra.sweep.subdir='${{job_name:${{hydra.overrides.task}},{','.join(varied)}}}'")
    return [*(word for word in words if not word.startswith("hydra.sweep.dir=")), *own]


def _values(override: Override) -> list[str]:
    """List the values of an override; of an interval, its ends."""
    value = override.value()
    return (
        [f"{value.start}", f"{value.end}"] if isinstance(value, IntervalSweep) else [*override.sweep_string_iterator()]
    )


def _refuse_hopeless(overrides: dict[str, Override], values: dict[str, list[str]]) -> None:
    """Compose the first job and the last one. Raises UserError if both are refused: what they share must be wrong."""
    errors = []
    for end in (0, -1):
        words = [
            f"{key}={values[key][end]}" if key in values else each.input_line or "" for key, each in overrides.items()
        ]
        try:
            new_run([word for word in words if word.startswith(SEARCH_PATH) or not word.startswith("hydra")])
        except UserError as error:
            errors.append(error)
    if len(errors) > 1:
        raise errors[0]


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


def job(config: DictConfig) -> Any:  # noqa: ANN401
    """Run one job of a sweep, which Hydra calls, with a launcher in another process. Its words are composed again, as
    those of a single run. An error is recorded in the job's directory, and the sweep continues.

    Returns a result for the sweeper: the best validation score, None after an error, or the name of the signal that
    stopped the job.
    """
    del config
    join_cluster()
    GlobalHydra.instance().clear()  # only this job's section `hydra` is needed from now on
    this = HydraConfig.get()
    directory, in_worker = Path(this.runtime.output_dir), not IN_SWEEP.is_set()
    words = cast(list[str], OmegaConf.to_container(this.overrides.task, resolve=False))
    search_path = [word for word in this.overrides.hydra if word.startswith(SEARCH_PATH)]
    if rank() == 0:
        (directory / ERROR).unlink(missing_ok=True)
    with _running(directory.name, in_worker):
        count = os.environ.get(COUNT)
        log.info("\njob %s%s: %s", this.job.num + 1, f" of {count}" if count else "", directory.name)
        try:
            status = _train(directory, [*words, *search_path])
        except Exception as error:
            message = explain(error, "train", words)
            if rank() == 0:
                record_failure(directory, message, words)
            log.error("%s: failed: %s", directory.name, message)
            return None
        if rank() == 0:
            (directory / ERROR).unlink(missing_ok=True)  # another sweep may have written it while this job was running
        if status >= STOPPED:
            if in_worker:
                return signal.Signals(status - STOPPED).name
            option = for_shell("hydra.sweep.dir", os.path.relpath(this.sweep.dir))
            log.info("to resume the sweep, run the same command with %s", option)
            sys.exit(status)  # the signal ends the whole sweep
    training: dict[str, Any] = read_json(RunDirectory(directory).manifest).get("training", {})
    return next((value for key, value in training.items() if key.startswith("best_") and key != "best_step"), None)


def _train(directory: Path, words: list[str]) -> int:
    start = new_run(words)
    threads = start.config.threads or _threads()
    start = start._replace(directory=directory, config=start.config.model_copy(update={"threads": threads}))
    RunDirectory(directory).wait_until_free(MAX_WAIT)
    if start.is_complete({FINISHED, PRUNED}):  # a single run goes on with a run that a sweep has pruned
        log.info("already finished: skipped")
        return 0
    return train(start, optuna_sweeper.observer())


def _threads() -> int | None:
    """Return the number of threads of each job, so that parallel jobs share the cores; None for PyTorch's default."""
    launcher = HydraConfig.get().launcher
    if (jobs := launcher.get("n_jobs")) is not None:
        return max(1, cores() // (jobs if jobs > 0 else cores()))
    threads: int | None = launcher.get("cpus_per_task")
    return threads


@contextmanager
def _running(name: str, in_worker: bool) -> Iterator[None]:
    """Set BUSY in the context. In a worker, also put the job's name before lines of standard error.

    A worker of the parallel launcher ends when the process of its sweep has ended (on a cluster, it has no such
    parent).
    """
    stderr, is_child = sys.stderr, in_worker and HydraConfig.get().launcher.get("n_jobs")
    BUSY.set()
    if in_worker:
        # This stream is not a terminal, so that no progress bars are shown: those of several jobs would collide.
        sys.stderr = _Prefixed(stderr, name)
        log_to_stream(sys.stderr)
    if is_child:
        _watch_the_sweep()
    try:
        yield
    finally:
        sys.stderr = stderr
        BUSY.clear()
        if is_child and os.getppid() != PARENT:
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
