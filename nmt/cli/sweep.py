"""Sweeps: each job has a directory named by its values. A failure is recorded there, and the other jobs continue."""

import io
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, ListConfig, OmegaConf

from nmt.cli.compose import SEARCH_PATH, as_words, explained, hydra_of, last_overrides, new_run
from nmt.cli.hydra_errors import explain
from nmt.cli.launch import train
from nmt.cli.run_command import STOPPED, log_to_stream
from nmt.compare.jobs import job_name, mark_sweep, record_failure, report_jobs
from nmt.config.checks import config_dir
from nmt.config.errors import UserError, for_shell, quoted, user_path
from nmt.system.files import folders_with
from nmt.system.processes import cores, end_with, join_cluster, rank
from nmt.system.run import ERROR, FINISHED, LOCK, PRUNED, SWEEP, RunDirectory, read_json

MAX_WAIT = 30.0  # seconds for a run to save and stop
# Environment variables, which worker processes inherit: the number of jobs, and the id of the sweep's process.
COUNT, PROCESS = "NMT_SWEEP_JOBS", "NMT_SWEEP_PROCESS"
_end_with_once = cache(end_with)  # a worker may run several jobs
log = logging.getLogger(__name__)


def run_sweep(config: DictConfig, words: Sequence[str]) -> int:
    """Let Hydra run the jobs of a sweep, and report them. Returns the exit status; raises UserError.

    `config` is composed from those words that have a single value.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep cannot run under torchrun; give its jobs several processes with processes=N")
    directory, search = user_path(config.hydra.sweep.dir), _search_module(config.hydra)
    arguments = _set_up(config, directory, words)
    with explained("train", words):
        call_hydra(["-m", *arguments])
    return report_jobs(directory, search is not None)


def call_hydra(arguments: list[str]) -> None:
    """Let Hydra run jobs, or install its completion in the user's shell."""
    sys.argv[1:] = arguments
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints exceptions itself
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(job)()


def _search_module(section: DictConfig) -> ModuleType | None:
    """Import the module that searches by Optuna, if Hydra's section chooses it. Raises UserError without Optuna."""
    if not section.sweeper._target_.endswith(".OptunaSweeper"):
        return None
    try:
        from nmt.cli import optuna_sweeper
    except ImportError:
        raise UserError("hydra/sweeper=optuna needs another package: pip install optuna") from None
    return optuna_sweeper


def _set_up(config: DictConfig, directory: Path, words: Sequence[str]) -> list[str]:
    """Check a sweep, mark its directory, tell its jobs by environment variables how many there are and which process
    starts them, and handle Ctrl-C for workers. A grid names the directory of each job by the values that it varies.

    Returns the words for Hydra.
    """
    sweeper, launcher = config.hydra.sweeper, config.hydra.launcher
    is_grid = "BasicSweeper" in sweeper._target_
    given = [*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *words]
    with explained("train", words), hydra_of("train"):  # so that the parser knows the choices that glob(...) stands for
        overrides = last_overrides(GlobalHydra.instance().config_loader(), given)
        values = {key: _values(each, is_grid) for key, each in overrides.items() if each.is_sweep_override()}
    if directory.is_dir() and any(directory.iterdir()) and not (directory / SWEEP).is_file():
        raise UserError(f"{directory}: is not empty and not a sweep; choose another hydra.sweep.dir")
    if "hydra.run.dir" in overrides:
        line = overrides["hydra.run.dir"].input_line
        raise UserError(f"{line}: sets the directory of a single run; that of a sweep is hydra.sweep.dir")
    if key := next((key for key, texts in values.items() if not texts), None):
        raise UserError(f"{key}: no values, so there is no job to run")
    if not is_grid and not values:
        raise UserError("hydra/sweeper=optuna: nothing to search; give a key several values or an interval(a,b)")
    fixed = as_words(each for each in overrides.values() if not each.is_sweep_override())
    _refuse_if_first_and_last_fail(
        [word for word in fixed if word.startswith(SEARCH_PATH) or not word.startswith("hydra")], values
    )
    directory.mkdir(parents=True, exist_ok=True)
    jobs = math.prod(map(len, values.values())) if is_grid else None  # a search may go on with further trials
    mark_sweep(directory, jobs or 0)
    os.environ |= {COUNT: str(jobs or sweeper.get("n_trials")), PROCESS: str(os.getpid())}
    # With one job at a time, joblib runs it in this process, where training handles Ctrl-C.
    if launcher.get("n_jobs", 1) != 1 and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, partial(_interrupt_after_saving, directory))
    own = [f"hydra.sweep.dir={quoted(directory)}"]
    if is_grid and values and "hydra.sweep.subdir" not in overrides:
        # In the names of directories, keys without a dot (such as groups) come first and the seed comes last.
        varied = sorted(values, key=lambda key: (key == "seed", "." in key))
        own.append(f"hydra.sweep.subdir='${{job_name:${{hydra.overrides.task}},{','.join(varied)}}}'")
    return [*(word for word in words if not word.startswith("hydra.sweep.dir=")), *own]


def _values(override: Override, is_grid: bool) -> list[str]:
    """List the values of an override; of an interval, which only a search takes, its ends."""
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return [*override.sweep_string_iterator()]
    if is_grid:
        raise UserError(f"{override.input_line}: interval(a,b) is for a search: add hydra/sweeper=optuna")
    return [f"{value.start}", f"{value.end}"]


def _refuse_if_first_and_last_fail(fixed: Sequence[str], values: Mapping[str, Sequence[str]]) -> None:
    """Compose the first job and the last one. Raises UserError if both are refused: what they share must be wrong."""
    errors = []
    for end in (0, -1):
        try:
            new_run([*fixed, *(f"{key}={texts[end]}" for key, texts in values.items())])
        except UserError as error:
            errors.append(error)
    if len(errors) > 1:
        raise errors[0]


def _interrupt_after_saving(sweep: Path, *_: object) -> None:
    """At Ctrl-C, wait until the workers have saved checkpoints: at KeyboardInterrupt, the launcher kills them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends the waiting
    for folder in folders_with(sweep, LOCK):
        RunDirectory(folder).wait_until_free(MAX_WAIT)
    raise KeyboardInterrupt


def _as_typed(words: Sequence[str]) -> list[str]:
    """Return words of the command line as they were typed: iteration would replace references such as ${seed}."""
    return cast(list[str], OmegaConf.to_container(cast(ListConfig, words), resolve=False))


# Registered at import, because a launcher's worker process imports modules but runs no `main`.
OmegaConf.register_new_resolver("job_name", lambda words, *keys: job_name(_as_typed(words), *keys), replace=True)


def job(config: DictConfig) -> Any:  # noqa: ANN401
    """Run one job of a sweep. Hydra calls this, for some launchers in another process. The job's words are composed
    again, as those of a single run. An error is recorded in the job's directory, and the sweep continues.

    Returns a result for the sweeper: the best validation score, None after an error, or the name of the signal that
    stopped the job.
    """
    del config
    join_cluster()
    GlobalHydra.instance().clear()  # only this job's section `hydra` is needed from now on
    this = HydraConfig.get()
    directory, in_worker = Path(this.runtime.output_dir), os.environ.get(PROCESS) != str(os.getpid())
    words = _as_typed(this.overrides.task)
    if rank() == 0:
        (directory / ERROR).unlink(missing_ok=True)
    with _as_worker(directory.name) if in_worker else nullcontext():
        count = os.environ.get(COUNT)
        log.info("\njob %s%s: %s", this.job.num + 1, f" of {count}" if count else "", directory.name)
        try:
            status = _train(directory, this, words)
        except Exception as error:
            message = explain(error, "train", words)
            if rank() == 0:
                record_failure(directory, message, words)
            log.error("%s: failed: %s", directory.name, message)
            return None
    if status >= STOPPED:
        if in_worker:
            return signal.Signals(status - STOPPED).name
        option = for_shell("hydra.sweep.dir", os.path.relpath(this.sweep.dir))
        log.info("to resume the sweep, run the same command with %s", option)
        sys.exit(status)  # the signal ends the whole sweep
    training: dict[str, Any] = read_json(RunDirectory(directory).manifest).get("training", {})
    return next((value for key, value in training.items() if key.startswith("best_") and key != "best_step"), None)


def _train(directory: Path, this: Any, words: list[str]) -> int:  # noqa: ANN401
    """Train the run of a job, whose section `hydra` is `this`, in its directory. Returns the exit status.

    words: the job's overrides as typed. Of Hydra's own overrides, which they lack, a run needs only the search path.
    """
    search_path = [word for word in _as_typed(this.overrides.hydra) if word.startswith(SEARCH_PATH)]
    request = new_run([*words, *search_path])
    threads = this.launcher.get("cpus_per_task")  # of a cluster's launcher
    if jobs := this.launcher.get("n_jobs"):  # the jobs of the parallel launcher share the cores; -1: a job on each core
        threads = max(1, cores() // jobs) if jobs > 0 else 1
    config = request.config.model_copy(update={"threads": request.config.threads or threads})
    RunDirectory(directory).wait_until_free(MAX_WAIT)
    observer = None
    if search := _search_module(this):
        folder, settings = Path(this.sweep.dir).absolute(), this.sweeper
        observer = search.TrialObserver(folder, this.job.num, settings.pruner, settings.startup_trials)
    # A sweep does not resume a pruned run; only the command for a single run does.
    return train(request._replace(directory=directory, config=config), observer, ended=(FINISHED, PRUNED))


@contextmanager
def _as_worker(name: str) -> Iterator[None]:
    """Put the job's name before lines of standard error. A worker of the parallel launcher, whose parent is the process
    of its sweep, ends when that has ended (on a cluster, it has no such parent)."""
    stderr, sweep, is_child = sys.stderr, os.getppid(), os.environ.get(PROCESS) == str(os.getppid())
    sys.stderr = _Prefixed(stderr, name)
    log_to_stream(sys.stderr)
    if is_child:
        _end_with_once(sweep)
    try:
        yield
    finally:
        sys.stderr = stderr
        if is_child and os.getppid() != sweep:
            os._exit(1)  # the sweep's process was killed


class _Prefixed(io.TextIOBase):
    """A stream that writes a job's name before each line, and is not a terminal: progress bars of several jobs would
    collide."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        self._stream.write("".join(f"[{self._name}] {line}\n" for line in text.splitlines()) if text.strip() else "")
        return len(text)
