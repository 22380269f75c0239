"""A command in several processes of this machine, by torch's elastic launcher: what processes=N does."""

import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmt.cli.help import explain
from nmt.cli.outcome import STOPPED, attempt, log_to_stream, report
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.system.distributed import OtherProcessFailed
from nmt.system.files import write_atomically
from nmt.system.processes import cores, rank
from nmt.training.job import train
from nmt.training.loop import Observer

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
WORK, MESSAGE = "work.pickle", "message"  # files of a launch: what to run, and why rank 0 failed
CRASHED, REPORTED = 1, 2  # exit status after a traceback, and after an error in one line
SECONDS_TO_EXPLAIN = 10.0  # for rank 0, after the error of another process
SECONDS_TO_SAVE = 600  # after a signal, for the update or validation in progress and the checkpoint


def train_in_processes(
    config: TrainConfig,
    directory: Path,
    overrides: list[str],
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
    job: Callable[..., int] = train,
) -> int:
    """`job`, which takes the other arguments, in config.processes processes. Returns the exit status.

    The processes are programs of their own: one that fails ends, which closes its connections and so ends the others.
    Raises UserError with the message of rank 0, or if a process was lost.
    """
    with tempfile.TemporaryDirectory(prefix="nmt-processes-") as folder:
        work, message = Path(folder, WORK), Path(folder, MESSAGE)
        arguments = (config, directory, overrides, choices, observer)
        work.write_bytes(pickle.dumps(sys.path) + pickle.dumps((job, arguments)))
        try:
            _launch(config.processes, folder, "from nmt.cli.launch import run; run()", folder)
        except SignalException as stop:
            return STOPPED + int(stop.sigval)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if message.exists():
                raise UserError(message.read_text(encoding="utf-8")) from None
            if failure.exitcode > STOPPED:  # a signal to this process alone stopped the group
                return int(failure.exitcode)
            if failure.exitcode == REPORTED:
                raise UserError("a process failed, as printed above") from None
            reason = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"status {failure.exitcode}"
            raise UserError(f"process {failure.local_rank} ended with {reason}; the checkpoints are intact") from None
    return 0


def run() -> NoReturn:
    """One of the processes that `train_in_processes` starts."""
    folder = Path(sys.argv[1])
    with (folder / WORK).open("rb") as file:
        sys.path[:] = pickle.load(file)
        job, arguments = pickle.load(file)
    log_to_stream(sys.stderr)
    try:
        outcome = attempt(partial(job, *arguments), debug=False)
    except Exception:
        traceback.print_exc()
        outcome = CRASHED
    if isinstance(outcome, Exception):
        if rank() == 0:
            try:
                write_atomically(folder / MESSAGE, explain(outcome, "train").encode())
            except OSError:  # the folder for temporary files is full, too
                report(outcome, "train")
        else:
            if not isinstance(outcome, OtherProcessFailed):
                report(outcome, "train")
            deadline = time.monotonic() + SECONDS_TO_EXPLAIN  # the launcher ends rank 0 when this process has ended
            while not (folder / MESSAGE).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        outcome = REPORTED
    if not outcome:
        sys.exit()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(outcome)  # an orderly exit would wait for the connections to processes that have failed


def repeat_in_processes(command: str, processes: int) -> int:
    """This command line in several processes, which share the standard streams. Returns the exit status; errors were
    printed."""
    words = [word for word in sys.argv[1:] if not word.startswith("processes=")]
    os.environ.pop("HYDRA_FULL_ERROR", None)  # set by this process; the others print errors in one line, too
    start = f"from nmt.cli.entry import {command}; {command}()"
    with tempfile.TemporaryDirectory(prefix="nmt-processes-") as folder:
        try:
            _launch(processes, folder, start, *words)
        except SignalException as stop:
            return STOPPED + int(stop.sigval)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            if failure.exitcode < 0:
                raise UserError(f"process {failure.local_rank} ended with signal {-failure.exitcode}") from None
            return int(failure.exitcode)
    return 0


def _launch(processes: int, folder: str, start: str, *words: str) -> None:
    """Run the Python statements `start` with these arguments in several processes, whose logs and error files go to
    `folder`. They end when this process is killed.

    Raises ChildFailedError if a process fails, SignalException at a signal, once all processes have ended.
    """
    known = {field.name for field in fields(LaunchConfig)}  # some options are newer than the oldest torch we support
    handled = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]  # under nohup
    newer = {"signals_to_handle": ",".join(handled), "shutdown_timeout": SECONDS_TO_SAVE}
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **{name: value for name, value in newer.items() if name in known},  # type: ignore[arg-type]
    )
    for name in logging.root.manager.loggerDict:  # they would announce signals and failures themselves
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with _threads_per_process(processes), _own_handlers():
        watch = f"from nmt.system.processes import end_with; end_with({os.getpid()})"
        elastic_launch(settings, sys.executable)("-c", f"{watch}; {start}", *words)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """After this context, signals are handled as before it: torch leaves its own handlers behind."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python
                signal.signal(number, handler)


@contextmanager
def _threads_per_process(processes: int) -> Iterator[None]:
    """Within this context, new processes divide the cores among them, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
