"""A command in several processes of this machine, by torch's elastic launcher: what processes=N does."""

import logging
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmt.cli.app import STOPPED, attempt, log_to_stream, report
from nmt.cli.help import explain
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.processes import cores, rank
from nmt.training.job import train
from nmt.training.trainer import Observer

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
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

    Raises UserError with the message of the first process, or if one of them was lost.
    """
    try:
        outcomes = _launch(config.processes, _run, job, config, directory, overrides, choices, observer)
    except SignalException as stop:
        return STOPPED + int(stop.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode > STOPPED:  # a signal to this process alone stopped the group
            return int(failure.exitcode)
        reason = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"status {failure.exitcode}"
        raise UserError(f"process {failure.local_rank} ended with {reason}; the checkpoints are intact") from None
    if message := next((outcome for outcome in outcomes.values() if isinstance(outcome, str)), None):
        raise UserError(message)
    status = max(int(outcome) for outcome in outcomes.values())
    if status:
        raise UserError("a process failed, as printed above")
    return status


def repeat_in_processes(command: str, processes: int) -> int:
    """This command line in several processes, which share the standard streams. Returns the exit status; errors were
    printed."""
    words = [word for word in sys.argv[1:] if not word.startswith("processes=")]
    os.environ.pop("HYDRA_FULL_ERROR", None)  # set by this process; the others print errors in one line, too
    start = f"from nmt.cli.entry import {command}; {command}()"
    try:
        _launch(processes, sys.executable, "-c", start, *words)
    except SignalException as stop:
        return STOPPED + int(stop.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise UserError(f"process {failure.local_rank} ended with signal {-failure.exitcode}") from None
        return int(failure.exitcode)
    return 0


def _launch(processes: int, work: Callable[..., int | str] | str, *arguments: Any) -> dict[int, Any]:  # noqa: ANN401
    """What `work`, a function or a program, returns in each process.

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
        **{name: value for name, value in newer.items() if name in known},  # type: ignore[arg-type]
    )
    for name in logging.root.manager.loggerDict:  # they would announce signals and failures themselves
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with _threads_per_process(processes), _own_handlers():
        outcomes: dict[int, Any] = elastic_launch(settings, work)(*arguments)
    return outcomes


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


def _run(job: Callable[..., int], *arguments: Any) -> int | str:  # noqa: ANN401
    """One of the processes. Returns the exit status, or the message of an error that is still to be printed."""
    log_to_stream(sys.stderr)
    try:
        outcome = attempt(partial(job, *arguments), debug=False)
    except Exception:
        traceback.print_exc()  # torch would write it to a file
        raise
    if isinstance(outcome, Exception):
        if rank() == 0:
            return explain(outcome, "train")
        report(outcome, "train")
        return 2
    if outcome >= STOPPED:
        sys.exit(outcome)  # a process that returns waits for the launcher, which waits for the process to end
    return outcome
