"""Code that all commands share: report a user's mistake in one line, end with an exit status, log and write."""

import contextlib
import errno
import io
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, AnyStr, NoReturn

from nmt.cli.compose import parse_arguments
from nmt.cli.explain import explain
from nmt.cli.help import information
from nmt.config.errors import UserError, format_value, printable, user_path
from nmt.system.processes import leave_group, local_rank, rank

DEBUG = "HYDRA_FULL_ERROR"  # environment variable that asks for tracebacks
MAX_MESSAGE = 500  # characters of a line of an error message; longer lines are cut
STOPPED = 128  # the exit status of a command that signal N stopped is STOPPED + N
# System errors that a user can cause: closed pipes and streams, full disks, missing permissions, unsuitable paths.
USER_ERRNOS = {
    *(errno.EPIPE, errno.EBADF),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
}


def run_command(
    command: str, work: Callable[[list[str]], int | None], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Call `work` with the arguments of the command line, report an error in one line, and exit.

    `work` returns the exit status, or None for 0. `arguments` replaces sys.argv[1:].
    """
    _prepare_streams(command)
    words = list(sys.argv[1:] if arguments is None else arguments)

    def job() -> int:
        _check_surroundings()
        log_to_stream(sys.stderr)
        text = information(command, parse_arguments(command, words))
        if text is None:
            return work(words) or 0
        if error := write(sys.stdout, text, "standard output"):
            raise error
        return 0

    outcome: int | Exception
    try:
        outcome = attempt(job, bool(os.environ.get(DEBUG)))
    except KeyboardInterrupt:
        print(f"nmt-{command}: interrupted", file=sys.stderr)
        outcome = STOPPED + signal.SIGINT
    except SystemExit as exit_:  # at a signal that stopped the job
        outcome = int(exit_.code or 0)
    unwritten = write(sys.stdout, "", "standard output")
    _exit(outcome if isinstance(outcome, Exception) else unwritten or outcome, command)


def _prepare_streams(command: str) -> None:
    """Replace standard input and standard error if they are closed, and let standard output take all characters.

    Python sets a stream to None if it was closed before the command began. Exits with 2 if standard output is closed.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        print(f"nmt-{command}: error: standard output is closed", file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks


def _check_surroundings() -> None:
    """Raise UserError where no command could work."""
    try:
        rank()
    except UserError:
        leave_group()  # so that the error can be reported
        raise
    with _reworded("the working directory was deleted; change to another one"):
        os.getcwd()
    with _reworded("no folder for temporary files can be written to; set TMPDIR to one"):
        tempfile.gettempdir()  # libraries need it as soon as they are imported


@contextlib.contextmanager
def _reworded(message: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(message) from None


def attempt(work: Callable[[], int], debug: bool) -> int | Exception:
    """Call `work`. Return its exit status, or the error that it raises if a user can cause such an error.

    Raises all other errors, and with `debug` all errors. Running out of memory is returned as a UserError.
    """
    try:
        return work()
    except (UserError, OSError) as error:
        if debug or (isinstance(error, OSError) and error.errno not in USER_ERRNOS):
            raise
        return error
    except (RuntimeError, MemoryError) as error:
        from nmt.system.machine import is_out_of_memory

        if debug or not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        return UserError(f"out of memory ({reason})" if reason else "out of memory")


def report(error: Exception, command: str) -> None:
    """Print an error, in one line for each problem.

    Before processes join a group, all meet the same error: only local rank 0 prints it. Only rank 0 prints that another
    process has failed.
    """
    name = f"nmt-{command}" if rank() == 0 else f"nmt-{command}, process {rank()}"
    if rank() and ((local_rank() and not joined()) or type(error).__name__ == "OtherProcessFailed"):
        return
    for line in explain(error, command).split("\n"):
        print(f"{name}: error: {format_value(line, MAX_MESSAGE)}", file=sys.stderr)


def _exit(outcome: int | Exception, command: str) -> NoReturn:
    """Print the error, if any, and exit: with 2 after an error, else with the status."""
    if isinstance(outcome, int):
        sys.exit(outcome)
    status = 0 if is_unread(outcome) else 2
    if status:
        report(outcome, command)
    if joined():  # the group's threads would abort an orderly exit
        leave(status)
    sys.exit(status)


def is_unread(error: Exception) -> bool:
    """Has the reader of the output ended, as in `nmt-translate ... | head`? That is no mistake."""
    return any(isinstance(each, BrokenPipeError) for each in (error, error.__cause__))


def leave(status: int) -> NoReturn:
    """Write what the standard streams hold, and end this process without waiting for other processes or threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def joined() -> bool:
    """Has this process joined a group, whose members tell each other of errors?"""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def write(stream: IO[AnyStr], content: AnyStr, name: str) -> OSError | None:
    """Write to a stream and flush it. Returns the error, if any, with `name` as its file name.

    After an error, redirects the stream to /dev/null: otherwise the interpreter would flush it at exit and fail again.
    """
    try:
        stream.write(content)
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        error.filename = name
        return error
    return None


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Escape control characters: names and errors in a message may come from untrusted files."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def log_to_stream(stream: Any) -> None:  # noqa: ANN401
    """Send the package's log messages to this stream only."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Printable("%(message)s"))
    # Use a filter instead of a level: the handler that tqdm puts in place copies only filters.
    level = logging.INFO if rank() == 0 else logging.CRITICAL  # only rank 0 logs
    handler.addFilter(lambda record: record.levelno >= level)
    logger = logging.getLogger("nmt")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def output_folder(output: str, marker: str, content: str, option: str = "output=") -> Iterator[Path]:
    """Create the folder `output` if it is missing. If the body raises, remove new folders that are empty.

    Raises UserError if the folder cannot be created or written, or if it holds files but not `marker`, the file by
    which an earlier result is recognised. In messages, `option` names the argument and `content` the kind of result.
    """
    folder = user_path(output)
    if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
        raise UserError(f"{option}{output}: is a file or lies below a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise UserError(f"{option}{output}: holds files other than {content}; name another folder")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}{output}: cannot be created ({error.strerror})") from None
    try:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{option}{output}: cannot be written; name another folder")
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            for path in created:
                path.rmdir()
        raise
