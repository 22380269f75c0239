"""Run a command in several processes of this machine by torch's elastic launcher, as processes=N asks."""

import atexit
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from nmt.cli.app import STOPPED, attempt, is_unread, leave, log_to_stream
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.explain import explain
from nmt.cli.start import Start
from nmt.config.errors import UserError
from nmt.config.schema.commands import SavedRunCommand
from nmt.system.processes import clean_start, cores, end_with, environment, rank, started_in_group

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Exit status of a process after a user's mistake, after any other exception, and where nobody reads its output.
REFUSED, CRASHED, UNREAD = 2, 1, 3
THIS_MACHINE, LOOPBACK = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
ALREADY = "processes=: several processes were started already; leave it out"
SECONDS_TO_SAVE = 600  # time for a process to finish its update or validation and to save, after a signal
S = TypeVar("S", bound=SavedRunCommand)


def shared_by_processes(command: str, task: Callable[[S], None]) -> Callable[[S], int]:
    """Wrap a command's task: config.processes processes then run it together and share the work."""

    def work(config: S) -> int:
        if config.processes > 1 and started_in_group():
            raise UserError(ALREADY)
        return in_processes(config.processes, command, task, config)

    return work


def train(start: Start, observer: Any) -> int:  # noqa: ANN401
    """Train a run in start.config.processes processes. Returns the exit status."""
    with exit_at_ctrl_c("train"):
        from nmt.training.job import train
    return in_processes(start.config.processes, "train", train, *start, observer)


def in_processes(count: int, command: str, job: Callable[..., int | None], *arguments: object) -> int:
    """Run `job(*arguments)` of a command in `count` processes, which share the standard streams.

    Runs it in this process alone if `count` is 1 or if this process was started together with others.

    When one fails, its end closes its connections, which ends the others as well. All end when this process is killed.
    Returns the exit status. Raises UserError with the message of the process that failed first.
    """
    if count == 1 or started_in_group():
        return job(*arguments) or 0
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in logging.root.manager.loggerDict:  # torch's loggers would announce signals and failures in their words
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // count)))  # of each process
    variables = environment(OMP_NUM_THREADS=threads, GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK))
    with tempfile.TemporaryDirectory(prefix="nmt-processes-") as folder, _own_handlers(), clean_start(), variables:
        try:
            statuses = elastic_launch(_settings(count, folder), _work)(os.getpid(), command, job, arguments)
        except SignalException as stop:
            return STOPPED + int(stop.sigval)
        except ChildFailedError as error:
            return _status_after(error.get_first_failure()[1], command)
    return max(map(int, statuses.values()))


def _settings(count: int, folder: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    # Signals that this process ignores, such as SIGHUP under nohup, stay ignored.
    handled = [number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # The oldest torch that we support lacks these options.
    newer = {"signals_to_handle": ",".join(handled), "shutdown_timeout": SECONDS_TO_SAVE}
    options = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{THIS_MACHINE}:0",
        local_addr=THIS_MACHINE,  # otherwise torch would look up the machine's name, which need not resolve
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **{name: value for name, value in newer.items() if name in options},  # type: ignore[arg-type]
    )


def _work(launcher: int, command: str, job: Callable[..., int | None], arguments: tuple[object, ...]) -> int:
    """Do the work of one process, and return its exit status.

    After an error, which torch records for the launcher, the process ends at once: an orderly exit would wait for the
    connections to processes that have failed. It may also end in SIGABRT while threads of torch still run.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    end_with(launcher)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 (multiprocessing has replaced it by /dev/null)
    log_to_stream(sys.stderr)

    @record
    def recorded() -> int:
        outcome = attempt(lambda: job(*arguments) or 0, debug=False)
        if isinstance(outcome, Exception):
            if is_unread(outcome):
                leave(UNREAD)
            raise UserError(explain(outcome, command)) from outcome
        return outcome

    try:
        status = recorded() or 0
    except KeyboardInterrupt:
        if rank() == 0:
            print(f"nmt-{command}: interrupted", file=sys.stderr)
        leave(STOPPED + signal.SIGINT)
    except UserError:
        leave(REFUSED)
    except Exception:
        leave(CRASHED)
    if status > STOPPED:  # the launcher, which passes on signals, would wait for the process and not for its status
        leave(status)
    atexit.register(leave, 0)  # when the launcher has read the status
    return int(status)


def _status_after(failure: "ProcessFailure", command: str) -> int:
    """Return the exit status of the whole command after the first failure of a process, if a signal or the reader of
    its output stopped it. Any other failure raises UserError."""
    status = failure.exitcode  # negative: the number of the signal that killed the process
    if status > STOPPED:
        return int(status)
    if status == UNREAD:
        return 0
    # torch's `record` saves an exception as {"message": {"message": "Type: text", "extraInfo": {"py_callstack": ...}}}.
    # If nothing was saved, torch returns {"message": "<NONE>"}.
    saved = failure.error_file_data.get("message", {}) if status > 0 else {}
    if status == REFUSED:
        message = saved.get("message", "") if isinstance(saved, dict) else str(saved)
        raise UserError(message.partition(": ")[2] or "a process failed, and its message could not be saved")
    if isinstance(saved, dict) and "extraInfo" in saved:
        print(saved["extraInfo"]["py_callstack"], end="", file=sys.stderr)
    reason = f"signal {-status}" if status < 0 else f"status {status}"
    checkpoints = "; the checkpoints are intact" if command == "train" else ""
    raise UserError(f"process {failure.local_rank} ended with {reason}{checkpoints}")


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Restore this process's signal handlers after the context: torch would leave its handlers in place."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler that was set outside Python cannot be restored
                signal.signal(number, handler)
