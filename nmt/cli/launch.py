"""Run a command in several processes of this machine by torch's elastic launcher, as processes=N asks."""

import atexit
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.cli.compose import RunRequest
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.hydra_errors import explain
from nmt.cli.run_command import STOPPED, attempt, is_unread, log_to_stream
from nmt.config.errors import UserError
from nmt.system import processes
from nmt.system.run import FINISHED

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Exit status of a process after a user's mistake, after any other exception, and where nobody reads its output.
REFUSED, CRASHED, UNREAD = 2, 1, 3
THIS_MACHINE, LOOPBACK = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
SECONDS_TO_SAVE = 600  # time for a process to finish its update or validation and to save, after a signal
log = logging.getLogger(__name__)


def train(request: RunRequest, observer: Any = None, ended: tuple[str, ...] = (FINISHED,)) -> int:  # noqa: ANN401
    """Train a run, in the processes that it asks for, unless it has ended with one of these statuses.

    Under torchrun, `processes` of a resumed run does not count. Returns the exit status.
    """
    if request.is_complete(*ended):
        log.info("already finished: skipped")
        return 0
    with exit_at_ctrl_c("train"):
        from nmt.training.job import train
    is_typed = any(word.startswith("processes=") for word in request.overrides)
    count = 1 if processes.started_in_group() and not is_typed else request.config.processes
    return in_processes(count, "train", train, *request, observer)


def in_processes(count: int, command: str, job: Callable[..., int | None], *arguments: object) -> int:
    """Run `job(*arguments)` of a command in `count` processes, which share the standard streams.

    When one fails, its end closes its connections, which ends the others as well. All end when this process is killed.
    Returns the exit status. Raises UserError with the message of the process that failed first, and if this process
    itself was started together with others.
    """
    if count == 1:
        return job(*arguments) or 0
    if processes.started_in_group():
        raise UserError("processes=: several processes were started already; leave it out")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in logging.root.manager.loggerDict:  # torch's loggers would announce signals and failures in their words
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, processes.cores() // count)))  # of each process
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    variables = processes.environment(OMP_NUM_THREADS=threads, GLOO_SOCKET_IFNAME=interface)
    temporary, handlers = tempfile.TemporaryDirectory(prefix="nmt-processes-"), processes.handlers_restored(SIGNALS)
    with temporary as folder, handlers, processes.clean_start(), variables:
        try:
            statuses = elastic_launch(_settings(count, folder), _work)(os.getpid(), folder, command, job, arguments)
        except SignalException as stop:
            return STOPPED + int(stop.sigval)
        except ChildFailedError as error:
            failure = error.get_first_failure()[1]
            return _status_after(failure.exitcode, failure.local_rank, Path(folder), command)
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


def _work(
    launcher: int, folder: str, command: str, job: Callable[..., int | None], arguments: tuple[object, ...]
) -> int:
    """Do the work of one process, and return its exit status. A user's mistake is written to a file for the launcher.

    After an error the process ends at once: an orderly exit would wait for the connections to processes that have
    failed. It may also end in SIGABRT while threads of torch still run.
    """
    processes.end_with(launcher)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115 (multiprocessing has replaced it by /dev/null)
    log_to_stream(sys.stderr)
    try:
        outcome = attempt(lambda: job(*arguments) or 0)
    except KeyboardInterrupt:
        if processes.rank() == 0:
            print(f"nmt-{command}: interrupted", file=sys.stderr)
        processes.leave(STOPPED + signal.SIGINT)
    except Exception:
        traceback.print_exc()
        processes.leave(CRASHED)
    if isinstance(outcome, Exception):
        if is_unread(outcome):
            processes.leave(UNREAD)
        Path(folder, f"{processes.rank()}.error").write_text(explain(outcome, command), encoding="utf-8")
        processes.leave(REFUSED)
    if outcome > STOPPED:  # the launcher, which passes on signals, would wait for the process and not for its status
        processes.leave(outcome)
    atexit.register(processes.leave, 0)  # when the launcher has read the status
    return outcome


def _status_after(status: int, number: int, folder: Path, command: str) -> int:
    """Return the exit status of the whole command after the failure of process `number` with this status, if a signal
    or the reader of its output stopped it. Any other failure raises UserError."""
    if status > STOPPED:
        return status
    if status == UNREAD:
        return 0
    messages = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    if status == REFUSED and messages:  # the first one is the cause of the others
        raise UserError(messages[0].read_text(encoding="utf-8"))
    reason = f"signal {-status}" if status < 0 else f"status {status}"  # negative: the signal that killed the process
    checkpoints = "; the checkpoints are intact" if command == "train" else ""
    raise UserError(f"process {number} ended with {reason}{checkpoints}")
