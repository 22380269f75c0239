"""Sweeps: a directory for each combination, named by what it varies, where failures are recorded."""

import hashlib
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from nmt.cli import optuna_sweeper, words
from nmt.cli.app import STOPPED, log_to, output_dir
from nmt.cli.explain import explain, record_failure
from nmt.cli.jobs import tell
from nmt.config.compose import config_dir
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell, override_values
from nmt.run import ERROR, LOCK, RunDirectory, read_json

MARK = ".nmt-sweep"  # an empty file: the directory is ours to write to
LONGEST_END = 30.0  # seconds that a run may take to save and stop
LONGEST_VALUE, LONGEST_NAME = 40, 200  # characters in a directory's name
COUNT = "NMT_SWEEP_JOBS"  # how many there are: an environment variable, which worker processes inherit
PARENT = os.getppid()  # of a worker, that is the sweep's process, which it must not outlive
log = logging.getLogger(__name__)


class NameJobs(Callback):
    """Hydra calls this before the jobs (configs/train.yaml, hydra.callbacks)."""

    directory: Path | None = None  # of the sweep that has begun
    made: bool = False  # was it made for this sweep?

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:  # noqa: ANN401
        """Let each job's directory be named by the values that the sweep varies, instead of a number."""
        directory = Path(config.hydra.sweep.dir)
        if config.hydra.launcher.get("n_jobs") and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, partial(_let_jobs_save, directory))
        varied, count = _varied(config)
        if why := _refusal(config, directory, varied, count):
            log.error("nmt-train: error: %s", why)  # an exception would be caught by Hydra and told as a warning
            sys.exit(2)
        NameJobs.directory, NameJobs.made = directory, not directory.exists()
        with suppress(OSError):  # Hydra makes the directory too, and its exception is reported
            directory.mkdir(parents=True, exist_ok=True)
            (directory / MARK).touch()
        os.environ[COUNT] = str(config.hydra.sweeper.get("n_trials") or count)
        given = [override.lstrip("+") for override in words.given(config.hydra, "hydra")]
        chosen = any(override.startswith("hydra.sweep.subdir=") for override in given)
        if varied and not chosen and config.hydra.sweeper._target_.endswith(".BasicSweeper"):
            with open_dict(config):  # these overrides are what Hydra composes each job from
                keys = ",".join(varied)
                config.hydra.overrides.hydra.append(
                    f"hydra.sweep.subdir='${{job_name:${{hydra.overrides.task}},{keys}}}'"
                )


def _let_jobs_save(sweep: Path, *_: object) -> None:
    """At Ctrl-C wait until the workers have saved checkpoints: at KeyboardInterrupt the launcher kills them at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait
    if not BUSY.is_set():
        for lock in list(sweep.rglob(LOCK)):
            RunDirectory(lock.parent).wait_until_free(LONGEST_END)
    raise KeyboardInterrupt


def _refusal(config: DictConfig, directory: Path, varied: list[str], count: int) -> str | None:
    """Why this is no sweep; None if it is one."""
    if _is_foreign(directory):
        return f"{directory}: is not empty and not a sweep; choose another hydra.sweep.dir"
    if not count:
        return f"{', '.join(varied)}: there is no value in it, so no job to run"
    for override in words.given(config.hydra, "hydra"):
        if override.startswith("hydra.run.dir="):
            return f"{override}: is for one run; a sweep's directory is hydra.sweep.dir"
    recipes = " ".join(word for word in words.given(config.hydra) if word.startswith("experiment="))
    ready = [path.stem for path in (config_dir() / "experiment").glob("*.yaml") if "MULTIRUN" in path.read_text()]
    if "experiment" in varied and any(name in recipes for name in ready):
        return "experiment: a ready sweep cannot be one value of a sweep; run them one after the other"
    return None


def _is_foreign(directory: Path) -> bool:
    """Does it hold anything that no sweep of nmt-train began?"""
    if not directory.is_dir() or not any(directory.iterdir()):
        return False
    return not (directory / MARK).is_file()


def _varied(config: DictConfig) -> tuple[list[str], int]:
    """The keys that take several values in this sweep, and the number of its combinations."""
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    given += words.given(config.hydra)
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())  # it knows the choices for glob(...)
    parsed = {override.get_key_element().lstrip("+"): override for override in parser.parse_overrides(given)}
    varied = {key: override for key, override in parsed.items() if override.is_sweep_override()}
    several = [override for override in varied.values() if override.is_discrete_sweep()]
    in_order = sorted(varied, key=lambda key: (key == "seed", "." in key))  # groups first, the seed last
    return in_order, math.prod(len(list(override.sweep_string_iterator())) for override in several)


def job_name(overrides: list[str] | ListConfig, *varied: str) -> str:
    """Such as attention-bahdanau_lr-0.003: only letters that need no quoting, in any shell or file system.

    What that leaves out or cuts is told apart by its hash.
    """
    plain = OmegaConf.to_container(overrides, resolve=False) if isinstance(overrides, ListConfig) else overrides
    values = override_values(cast(list[str], plain))
    ends = [key.rpartition(".")[2] for key in varied]
    names = [key if ends.count(end) > 1 else end for key, end in zip(varied, ends, strict=True)]
    parts = [f"{_plain(name)}-{_plain(str(values.get(key)))}" for key, name in zip(varied, names, strict=True)]
    return _cut("_".join(parts), LONGEST_NAME)


def _plain(text: str) -> str:
    plain = re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)
    return _cut(plain if plain == text else f"{plain}-{_hash(text)}", LONGEST_VALUE)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 7]}-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


observer = optuna_sweeper.observer

# At import, since a launcher's worker process imports this module and nothing else of the command.
OmegaConf.register_new_resolver("job_name", job_name, replace=True)


def sweeping() -> bool:
    """Is this one job of several?"""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def refuse_outside_a_sweep() -> None:
    """Raises UserError for what a single run would ignore."""
    for override in words.given(HydraConfig.get(), "hydra"):
        if override.startswith(
            ("hydra/launcher=", "hydra/sweeper=", "hydra.launcher.", "hydra.sweeper.", "hydra.sweep.")
        ):
            raise UserError(f"{override}: is for a sweep; add -m")


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

    Returns what the sweeper is to know: the best validation score, None of a job that failed, a signal's name of one
    that it stopped.
    """
    directory = output_dir()
    in_worker = NameJobs.directory is None  # whichever the launcher: parallel with n_jobs=1 needs no worker
    (directory / ERROR).unlink(missing_ok=True)
    with _busy(), _in_worker(directory.name) if in_worker else nullcontext():
        number, count = HydraConfig.get().job.num + 1, os.environ.get(COUNT)
        log.info("\njob %s%s: %s", number, f" of {count}" if count else "", directory.name)
        try:
            status = work()
        except Exception as error:
            message = explain(error, command)
            record_failure(directory, message, words.given(HydraConfig.get()))
            log.error("%s: failed: %s", directory.name, message)
            return None
        (directory / ERROR).unlink(missing_ok=True)  # of another sweep that found this job at work
        if status >= STOPPED:
            if in_worker:
                return signal.Signals(status - STOPPED).name
            given = for_shell("hydra.sweep.dir", os.path.relpath(HydraConfig.get().sweep.dir))
            log.info("go on with the whole sweep: the same command with %s", given)
            sys.exit(status)  # in this process a signal means the whole sweep
    best: dict[str, Any] = read_json(RunDirectory(directory).manifest).get("training", {})
    return next((value for key, value in best.items() if key in {"best_bleu", "best_loss"}), None)


BUSY = threading.Event()  # set while this process runs a job


@contextmanager
def _busy() -> Iterator[None]:
    BUSY.set()
    try:
        yield
    finally:
        BUSY.clear()


@contextmanager
def _in_worker(name: str) -> Iterator[None]:
    """Begin each line on the terminal with the job's name, and end this worker with its sweep."""
    before = sys.stderr
    sys.stderr = _Named(before, name)  # no terminal: progress bars of several jobs would overwrite each other
    log_to(sys.stderr)
    if HydraConfig.get().launcher.get("n_jobs"):  # a worker on a cluster has another parent
        _watch_the_sweep()
    try:
        yield
    finally:
        sys.stderr = before


@cache
def _watch_the_sweep() -> None:
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()


def _end_with_the_sweep() -> None:
    """Save a checkpoint of the job and end this worker, once the sweep's process has been killed."""
    while os.getppid() == PARENT:
        time.sleep(1)
    if BUSY.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
    while BUSY.is_set():
        time.sleep(0.1)
    os._exit(1)  # nobody waits for it any more


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


def finish() -> int:
    """After the last job, or where the launcher gave up. Returns the exit status."""
    directory = NameJobs.directory
    if directory is None or not directory.is_dir():
        return 0  # no sweep
    status = tell(directory)
    if NameJobs.made and {path.name for path in directory.iterdir()} <= {MARK, "multirun.yaml"}:  # no job began
        shutil.rmtree(directory)
    return status
