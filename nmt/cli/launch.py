"""Run a command in several processes of this machine by torch's elastic launcher, as processes=N asks."""

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
from nmt.config.schema.commands import SavedRunCommand
from nmt.system.files import write_atomically
from nmt.system.processes import cores, rank, started_in_group

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
WORK, ERROR = "work.pickle", "error.pickle"  # files in the folder of a launch: what to run, and the error of rank 0
CRASHED, REPORTED = 1, 2  # exit status after a traceback, and after an error in one line
THIS_MACHINE, LOOPBACK = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
SECONDS_TO_EXPLAIN = 10.0  # time for rank 0 to write its error after another process has failed
SECONDS_TO_SAVE = 600  # time for a process to finish its update or validation and to save, after a signal
S = TypeVar("S", bound=SavedRunCommand)


def in_processes(count: int, command: str, job: Callable[..., int | None], *arguments: object) -> int:
    """Run `job(*arguments)` of a command in `count` processes, which share the standard streams.

    Each process is a new Python program. When one fails, its end closes its connections, which ends the others as well.
    Returns the exit status. Raises the error of rank 0, or UserError if another process failed or was killed.
    """
    with tempfile.TemporaryDirectory(prefix="nmt-processes-") as folder:
        Path(folder, WORK).write_bytes(pickle.dumps(sys.path) + pickle.dumps((command, job, arguments)))
        failure = _launch(count, folder)
        if isinstance(failure, int):
            return failure
        if (error := Path(folder, ERROR)).exists():
            raise pickle.loads(error.read_bytes())
        if failure.exitcode > STOPPED:  # a signal to a single process stopped the group
            return int(failure.exitcode)
        if failure.exitcode == REPORTED:
            raise UserError("a process failed, as printed above")
        reason = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"status {failure.exitcode}"
        checkpoints = "; the checkpoints are intact" if command == "train" else ""
        raise UserError(f"process {failure.local_rank} ended with {reason}{checkpoints}")


def run() -> NoReturn:
    """Run as one of the processes that `in_processes` starts: do the work in the folder sys.argv[1], and exit."""
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
            except OSError:  # the disk of the temporary folder is full
                report(outcome, command)
        else:
            report(outcome, command)
            # Wait until rank 0 has written its error: the launcher ends rank 0 when this process ends.
            deadline = time.monotonic() + SECONDS_TO_EXPLAIN
            while not (folder / ERROR).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        outcome = REPORTED
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # An orderly exit would wait for the connections to processes that have failed. It may also end in SIGABRT while
    # threads of torch still run.
    os._exit(outcome)


def shared_by_processes(command: str, task: Callable[[S, list[str]], None]) -> Callable[[S, list[str]], int]:
    """Wrap a command's task: config.processes processes then run it together and share the work."""

    def work(config: S, overrides: list[str]) -> int:
        if config.processes == 1:
            task(config, overrides)
            return 0
        if started_in_group():
            raise UserError("processes=: several processes were started already; leave it out")
        return in_processes(config.processes, command, task, config, overrides)

    return work


def _launch(processes: int, folder: str) -> "int | ProcessFailure":
    """Call `run` in several processes on the work in `folder`, and wait until all have ended.

    Returns the exit status, or the first failure of a process. The processes also end when this one is killed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {field.name for field in fields(LaunchConfig)}
    # Signals that this process ignores, such as SIGHUP under nohup, stay ignored.
    handled = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
    # The oldest torch that we support lacks these options.
    newer = {"signals_to_handle": ",".join(handled), "shutdown_timeout": SECONDS_TO_SAVE}
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{THIS_MACHINE}:0",
        local_addr=THIS_MACHINE,  # otherwise torch would look up the machine's name, which need not resolve
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **{name: value for name, value in newer.items() if name in options},  # type: ignore[arg-type]
    )
    for name in logging.root.manager.loggerDict:  # torch's loggers would announce signals and failures in their words
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = max(1, cores() // processes)  # of each process, unless the user has set OMP_NUM_THREADS
    start = (
        f"import os; os.environ.setdefault('OMP_NUM_THREADS', '{threads}');"
        f"os.environ.setdefault('GLOO_SOCKET_IFNAME', '{LOOPBACK}');"
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
    """Restore this process's signal handlers after the context: torch would leave its handlers in place."""
    before = {number: signal.getsignal(number) for number in (getattr(signal, name) for name in SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler that was set outside Python cannot be restored
                signal.signal(number, handler)
