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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from nmt.cli import optuna_sweeper
from nmt.cli.app import STOPPED, log_to_stream, output_dir
from nmt.cli.compose import DRY_RUN, SWEEP_KEYS, compose, job_overrides, user_folders
from nmt.cli.help import choices_of, explain
from nmt.compare.jobs import mark_sweep, record_failure, report_jobs
from nmt.config.compose import config_dir
from nmt.config.errors import UserError, for_shell, format_value, override_values, plain_value
from nmt.config.schema import TrainConfig
from nmt.system.files import folders_with, short_name
from nmt.system.processes import cores, end_with, join_cluster, rank
from nmt.system.run import ERROR, LOCK, SWEEP, RunDirectory, read_json

MAX_WAIT = 30.0  # seconds for a run to save and stop
MAX_VALUE, MAX_NAME = 40, 200  # characters of one value, and of the whole name of a job's directory
GRID = f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"  # Hydra's sweeper, which runs all combinations of values
COUNT = "NMT_SWEEP_JOBS"  # environment variable with the number of jobs, which worker processes inherit
PARENT = os.getppid()  # id of the parent process, which for a worker of the parallel launcher is the sweep
BUSY = threading.Event()  # set while this process runs a job
# Directory of the sweep in progress, and whether the sweep has created it; empty in worker processes.
_started: list[tuple[Path, bool]] = []
log = logging.getLogger(__name__)
observer = optuna_sweeper.observer


class NameJobs(Callback):
    """Prepares a sweep: Hydra calls this before the first job (configs/train.yaml, hydra.callbacks)."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:  # noqa: ANN401
        """Check and mark the sweep's directory, and name each job's directory by the values that the sweep varies."""
        directory = Path(config.hydra.sweep.dir)
        if config.hydra.launcher.get("n_jobs") and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, partial(_interrupt_after_saving, directory))
        varied, count = _varied(config)
        grid = config.hydra.sweeper._target_ == GRID
        if reason := _refusal(config, directory, varied, count) or (grid and refused_jobs(config, varied)):
            log.error("nmt-train: error: %s", reason)  # Hydra would turn an exception into a warning
            sys.exit(2)
        _started[:] = [(directory, not os.path.lexists(directory))]
        with suppress(OSError):  # Hydra creates the directory as well, and reports the error
            directory.mkdir(parents=True, exist_ok=True)
            mark_sweep(directory, 0 if config.hydra.sweeper.get("n_trials") else count)
        os.environ[COUNT] = str(config.hydra.sweeper.get("n_trials") or count)
        hydra_overrides = job_overrides(config.hydra, "hydra")
        named = any(override.lstrip("+").startswith("hydra.sweep.subdir=") for override in hydra_overrides)
        if varied and not named and grid:
            name = f"${{job_name:${{hydra.overrides.task}},{','.join(varied)}}}"
            with open_dict(config):  # Hydra composes the configuration of each job from these overrides
                config.hydra.overrides.hydra.append(f"hydra.sweep.subdir='{name}'")


def _interrupt_after_saving(sweep: Path, *_: object) -> None:
    """At Ctrl-C, wait until the workers have saved checkpoints: at KeyboardInterrupt, the launcher kills them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the waiting
    if not BUSY.is_set():
        for folder in folders_with(sweep, LOCK):
            RunDirectory(folder).wait_until_free(MAX_WAIT)
    raise KeyboardInterrupt


def _refusal(config: DictConfig, directory: Path, varied: list[str], count: int) -> str | None:
    """Return the reason why this sweep cannot run, or None if it can."""
    if DRY_RUN in sys.argv:
        return f"{DRY_RUN}: tries a single run, but this is a sweep; give each key one value, without -m"
    if os.path.isdir(directory) and any(directory.iterdir()) and not (directory / SWEEP).is_file():
        return f"{directory}: is not empty and not a sweep; choose another hydra.sweep.dir"
    if reason := _refused_values(config, varied, count):
        return reason
    for override in job_overrides(config.hydra, "hydra"):
        if override.startswith("hydra.run.dir="):
            return f"{override}: sets the directory of a single run; that of a sweep is hydra.sweep.dir"
    recipes = " ".join(word for word in job_overrides(config.hydra) if word.startswith("experiment="))
    files = {name: config_dir() / "experiment" / f"{name}.yaml" for name in choices_of("experiment", "train")}
    for folder in user_folders(config.hydra):
        files |= {path.stem: path for path in (folder / "experiment").glob("*.yaml")}
    sweeps = [name for name, path in files.items() if "MULTIRUN" in path.read_text(errors="replace")]
    if "experiment" in varied and any(name in recipes for name in sweeps):
        return (
            "experiment: one of these recipes is itself a sweep, which cannot be part of another; run them one by one"
        )
    return None


def _refused_values(config: DictConfig, varied: list[str], count: int) -> str | None:
    """Return an error message if there is no job, if jobs would resume a run, or if two jobs would be the same."""
    if any(word.startswith("run=") for word in job_overrides(config.hydra)):
        return "run=: resumes a single run; resume a sweep with hydra.sweep.dir=DIR"
    if not count:
        return f"{', '.join(varied)}: no values, so there is no job to run"
    for key, override in _parsed(config).items():
        if not override.is_discrete_sweep():
            continue
        counts = Counter(plain_value(value) for value in override.sweep_string_iterator())
        if repeated := [value for value, count in counts.items() if count > 1]:
            return f"{key}: the sweep has the value {format_value(repeated[0])} several times; name each value once"
    return None


def refused_jobs(config: DictConfig, varied: list[str]) -> str | None:
    """Compose the configurations of the jobs, and warn of those that are refused: their jobs will fail.

    Returns the first error message if all are refused, else None. Once a job is accepted, each further seed and each
    further combination of other values is tried in one job only.
    """
    search_path = [word for word in job_overrides(config.hydra, "hydra") if word.startswith("hydra.searchpath=")]
    messages: dict[str, str] = {}  # of refused jobs, by their values
    tried: set[tuple[str, ...]] = set()
    accepted = False
    (jobs,) = BasicSweeper.split_arguments([*_parsed(config).values()], None)
    log.info("checking the configurations of %d jobs", len(jobs))
    for job in jobs:
        seed, others = (tuple(word for word in job if word.startswith("seed=") == which) for which in (True, False))
        if accepted and tried.issuperset((seed, others)):
            continue
        tried |= {seed, others}
        try:
            compose("train", TrainConfig, [*search_path, *job], auto_size="small", started=True)
            accepted = True
        except UserError as error:
            words = {word.partition("=")[0].lstrip("+"): word for word in job}
            messages[" ".join(words[key] for key in varied)] = str(error)
    if not accepted:
        return next(iter(messages.values()))
    for values, message in messages.items():
        log.warning("%s: will fail: %s", values, message.partition("\n")[0])
    return None


def _varied(config: DictConfig) -> tuple[list[str], int]:
    """Return the keys that take several values in this sweep, and the number of combinations."""
    varied = {key: override for key, override in _parsed(config).items() if override.is_sweep_override()}
    discrete = [override for override in varied.values() if override.is_discrete_sweep()]
    # In the names of directories, keys without a dot (such as groups) come first and the seed comes last.
    keys = sorted(varied, key=lambda key: (key == "seed", "." in key))
    return keys, math.prod(len(list(override.sweep_string_iterator())) for override in discrete)


def _parsed(config: DictConfig) -> dict[str, Override]:
    """Parse the sweep's overrides, by key. A later override of a key replaces an earlier one."""
    overrides = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    overrides += job_overrides(config.hydra)
    # With the loader, the parser knows the choices that glob(...) stands for.
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    return {override.get_key_element().lstrip("+"): override for override in parser.parse_overrides(overrides)}


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


def sweeping() -> bool:
    """Does this process run jobs of a sweep?"""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def refuse_sweep_options() -> None:
    """Raises UserError for options that a single run would ignore."""
    hydra_config = HydraConfig.get()
    overrides = job_overrides(hydra_config, "hydra")
    for override in overrides:
        if override.startswith(SWEEP_KEYS):
            raise UserError(f"{override}: is for a sweep; add -m")
    params = hydra_config.sweeper.get("params")
    if params and "hydra.mode=RUN" not in sys.argv:  # Hydra adds hydra.mode to its overrides in any case
        raise UserError(
            f"experiment: this recipe varies {', '.join(params)}; add -m, or hydra.mode=RUN for a single run"
        )


def job_threads() -> int | None:
    """Return the number of threads of each job, so that parallel jobs share the cores; None for PyTorch's default."""
    launcher = HydraConfig.get().launcher
    jobs: int | None = launcher.get("n_jobs")
    if jobs is not None:
        return max(1, cores() // (jobs if jobs > 0 else cores()))
    threads: int | None = launcher.get("cpus_per_task")
    return threads


def run_job(work: Callable[[], int], command: str) -> Any:  # noqa: ANN401
    """Run one job of a sweep. An error is recorded in the job's directory, and the sweep continues.

    Returns a result for the sweeper: the best validation score, None after an error, or the name of the signal that
    stopped the job.
    """
    join_cluster()
    directory = output_dir()
    in_worker = not _started  # only the sweep's own process fills `_started`; without workers it runs the jobs itself
    if rank() == 0:
        (directory / ERROR).unlink(missing_ok=True)
    with _running(directory.name, in_worker):
        number, count = HydraConfig.get().job.num + 1, os.environ.get(COUNT)
        log.info("\njob %s%s: %s", number, f" of {count}" if count else "", directory.name)
        try:
            status = work()
        except Exception as error:
            message = explain(error, command)
            if rank() == 0:
                record_failure(directory, message, job_overrides(HydraConfig.get()))
            log.error("%s: failed: %s", directory.name, message)
            return None
        if rank() == 0:
            (directory / ERROR).unlink(missing_ok=True)  # another sweep may have written it while this job was running
        if status >= STOPPED:
            if in_worker:
                return signal.Signals(status - STOPPED).name
            option = for_shell("hydra.sweep.dir", os.path.relpath(HydraConfig.get().sweep.dir))
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
