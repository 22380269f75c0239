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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from nmt.cli.app import STOPPED, attempt, log_to_stream, report
from nmt.cli.help import explain
from nmt.config.errors import UserError
from nmt.config.schema import SavedRunCommand
from nmt.system.files import write_atomically
from nmt.system.processes import cores, rank, started_in_group

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
WORK, ERROR = "work.pickle", "error.pickle"  # files of a launch: what to run, and why rank 0 failed
CRASHED, REPORTED = 1, 2  # exit status after a traceback, and after an error in one line
SECONDS_TO_EXPLAIN = 10.0  # for rank 0, after the error of another process
SECONDS_TO_SAVE = 600  # after a signal, for the update or validation in progress and the checkpoint
S = TypeVar("S", bound=SavedRunCommand)


def in_processes(count: int, command: str, job: Callable[..., int | None], *arguments: object) -> int:
    """Run `job(*arguments)` of a command in `count` processes, which share the standard streams.

    They are programs of their own: one that fails ends, which closes its connections and so ends the others. Returns
    the exit status. Raises the error of rank 0, or UserError if a process was lost.
    """
    with tempfile.TemporaryDirectory(prefix="nmt-processes-") as folder:
        Path(folder, WORK).write_bytes(pickle.dumps(sys.path) + pickle.dumps((command, job, arguments)))
        failure = _launch(count, folder)
        if isinstance(failure, int):
            return failure
        if (error := Path(folder, ERROR)).exists():
            raise pickle.loads(error.read_bytes())
        if failure.exitcode > STOPPED:  # a signal to this process alone stopped the group
            return int(failure.exitcode)
        if failure.exitcode == REPORTED:
            raise UserError("a process failed, as printed above")
        reason = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"status {failure.exitcode}"
        checkpoints = "; the checkpoints are intact" if command == "train" else ""
        raise UserError(f"process {failure.local_rank} ended with {reason}{checkpoints}")


def run() -> NoReturn:
    """Be one of the processes that `in_processes` starts."""
    folder = Path(sys.argv[1])
    with (folder / WORK).open("rb") as file:
        sys.path[:] = pickle.load(file)
        command, job, arguments = pickle.load(file)
    log_to_stream(sys.stderr)
    try:
        outcome = attempt(lambda: job(*arguments) or 0, debug=False)
    except KeyboardInterrupt:
        if rank() == 0:
            print(f"nmt-{command}: interrupted", file=sys.stderr)
        outcome = STOPPED + signal.SIGINT
    except Exception:
        traceback.print_exc()
        outcome = CRASHED
    if isinstance(outcome, Exception):
        if rank() == 0:
            error = outcome if isinstance(outcome, OSError) else UserError(explain(outcome, command))
            try:
                write_atomically(folder / ERROR, pickle.dumps(error))
            except OSError:  # the folder for temporary files is full, too
                report(outcome, command)
        else:
            report(outcome, command)
            deadline = time.monotonic() + SECONDS_TO_EXPLAIN  # the launcher ends rank 0 when this process has ended
            while not (folder / ERROR).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        outcome = REPORTED
    if not outcome:
        sys.exit()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(outcome)  # an orderly exit would wait for the connections to processes that have failed


def shared_by_processes(command: str, task: Callable[[S, list[str]], None]) -> Callable[[S, list[str]], int]:
    """Return the task of a command that runs in config.processes processes, which share the work."""

    def work(config: S, overrides: list[str]) -> int:
        if config.processes == 1:
            task(config, overrides)
            return 0
        if started_in_group():
            raise UserError("processes=: several processes were started already; leave it out")
        return in_processes(config.processes, command, task, config, overrides)

    return work


def _launch(processes: int, folder: str) -> "int | ProcessFailure":
    """Call `run` in several processes, whose work stands in `folder`, until all have ended. They also end when this
    process is killed.

    Returns the exit status, or the first failure of a process.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {field.name for field in fields(LaunchConfig)}  # some are newer than the oldest torch we support
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
        **{name: value for name, value in newer.items() if name in options},  # type: ignore[arg-type]
    )
    for name in logging.root.manager.loggerDict:  # they would announce signals and failures themselves
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = max(1, cores() // processes)  # of each process, unless the user has set their number
    start = (
        f"import os; os.environ.setdefault('OMP_NUM_THREADS', '{threads}');"
        f"from nmt.system.processes import end_with; end_with({os.getpid()});"
        "from nmt.cli.launch import run; run()"
    )
    with _own_handlers():
        try:
            elastic_launch(settings, sys.executable)("-c", start, folder)
        except SignalException as stop:
            return STOPPED + int(stop.sigval)
        except ChildFailedError as error:
            return error.get_first_failure()[1]
    return 0


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Restore the handlers of signals after this context: torch leaves its own behind."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python
                signal.signal(number, handler)
