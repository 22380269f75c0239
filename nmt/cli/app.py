"""Code that all commands share: start Hydra, report a user's mistake in one line, end with an exit status."""

import contextlib
import errno
import io
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, AnyStr, NoReturn, TypeVar

from hydra import version
from hydra._internal.utils import _run_hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from nmt.cli.compose import argument_parser, job_config, job_overrides, parse_arguments, value_of
from nmt.cli.compose import choices as choices_of
from nmt.cli.help import explain
from nmt.config.compose import config_dir
from nmt.config.errors import UserError, format_value, printable, quoted, user_path
from nmt.system.processes import local_rank, rank

MAX_MESSAGE = 500  # characters of a line of an error message; longer lines are cut
STOPPED = 128  # the exit status of a command that signal N stopped is STOPPED + N
# System errors that a user can cause: closed pipes and streams, full disks, missing permissions, unsuitable paths.
STREAM_ERRNOS = {errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
USER_ERRNOS = {
    *STREAM_ERRNOS,
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
}
T = TypeVar("T", bound=BaseModel)


def run_command(
    command: str,
    schema: type[T],
    task: Callable[[T, list[str]], int | None],
    sweep: ModuleType | None = None,
    run_dir: Path | None = None,
    arguments: list[str] | None = None,
) -> NoReturn:
    """Compose configs/<command>.yaml with the arguments of the command line, check it, call `task`, exit.

    `task` takes the typed config and the list of overrides, and returns the exit status, or None for 0. `sweep` is the
    module nmt.cli.sweep if the command can run several jobs. `run_dir` replaces hydra.run.dir, so that Hydra creates no
    other directory. `arguments` replaces sys.argv[1:].
    """
    _prepare_streams(command)
    check_surroundings(command)
    debug = bool(os.environ.get("HYDRA_FULL_ERROR"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints exceptions itself
    log_to_stream(sys.stderr)
    # Hydra only warns of mistakes such as a missing search path: raise an error instead.
    warnings.filterwarnings("error", category=UserWarning, module=r"hydra\.")
    arguments = [word.removeprefix("++") for word in (sys.argv[1:] if arguments is None else arguments)]
    # Exit status or error of the job (None while it runs), or Hydra's error before it; then that of the sweep's report.
    outcomes: list[int | Exception | None] = []
    named = [value_of(argument) for argument in arguments if argument.startswith("hydra.run.dir=")]
    is_new = not (named and os.path.lexists(os.path.expanduser(named[-1])))
    job = _job(command, schema, task, sweep, debug, outcomes, is_new)
    try:
        try:
            _start_hydra(command, schema, job, run_dir, arguments)
        except Exception as error:
            if debug or outcomes:  # a job catches the user's mistakes: another error after a job has begun is a bug
                raise
            if isinstance(error, OSError) and error.errno in STREAM_ERRNOS and error.filename is None:
                error.filename = "standard output"  # Hydra prints --help and similar texts there
            outcomes.append(error)  # an error in the command line or in a launcher
        if sweep is not None:
            outcomes.append(attempt(sweep.finish, debug))
    except KeyboardInterrupt:
        print(f"nmt-{command}: interrupted", file=sys.stderr)
        outcomes = [STOPPED + signal.SIGINT]
    except SystemExit as exit_:  # after --help and the like, at a signal that stopped the job, or if a sweep is refused
        outcomes = [int(exit_.code or 0)]
    # An error of standard output may already be among the outcomes: list it once.
    if unwritten := write(sys.stdout, "", "standard output"):
        outcomes = [unwritten, *(outcome for outcome in outcomes if getattr(outcome, "errno", None) != unwritten.errno)]
    _exit(outcomes, command)


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


def check_surroundings(command: str) -> None:
    """Exit with 2, after one line, where no command could work."""
    try:
        rank()
        with _reworded("the working directory was deleted; change to another one"):
            os.getcwd()
        with _reworded("no folder for temporary files can be written to; set TMPDIR to one"):
            tempfile.gettempdir()  # libraries need it as soon as they are imported
    except UserError as error:
        print(f"nmt-{command}: error: {error}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def _reworded(message: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(message) from None


def _job(
    command: str,
    schema: type[T],
    task: Callable[[T, list[str]], int | None],
    sweep: ModuleType | None,
    debug: bool,
    outcomes: list[int | Exception | None],
    is_new: bool,
) -> Callable[[DictConfig], Any]:
    """Return the function that Hydra calls for each job.

    Outside a sweep, the function appends the job's outcome to `outcomes`: None while the job runs, then its exit status
    or error. `is_new` is False if a folder existed at hydra.run.dir= before Hydra started.
    """

    def job(config: DictConfig) -> Any:  # noqa: ANN401
        def work() -> int:
            return task(job_config(schema, config, command), job_overrides(HydraConfig.get())) or 0

        if sweep is not None and sweep.sweeping():
            return sweep.run_job(work, command)
        outcomes.append(None)
        outcomes[-1] = outcome = attempt(work, debug)
        if isinstance(outcome, Exception) and rank() == 0 and is_new:
            _remove_empty_directories()
        elif isinstance(outcome, int) and outcome >= STOPPED:
            sys.exit(outcome)
        return None

    return job


def _start_hydra(
    command: str,
    schema: type[BaseModel],
    job: Callable[[DictConfig], Any],
    run_dir: Path | None,
    arguments: list[str],
) -> None:
    """Do what hydra.main does, with these arguments in place of sys.argv."""
    parser = argument_parser(command)
    options = parse_arguments(parser, arguments, schema, command)
    if run_dir is not None:
        others = [word for word in options.overrides if not word.startswith("hydra.run.dir=")]
        options.overrides = [*others, f"hydra.run.dir={quoted(str(run_dir))}"]
    version.setbase("1.3")
    _run_hydra(options, parser, job, str(config_dir()), command)


def attempt(work: Callable[[], int], debug: bool) -> int | Exception:
    """Call `work`. Return its exit status, or the error that it raises if a user can cause such an error.

    Raises all other errors, and with `debug` all errors. Running out of memory is returned as a UserError.
    """
    try:
        return work()
    except (UserError, OmegaConfBaseException, OSError) as error:
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


def _exit(outcomes: list[int | Exception | None], command: str) -> NoReturn:
    """Print the errors and exit: with 2 after an error, else with the highest status."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    status = 2 if errors else max((outcome for outcome in outcomes if isinstance(outcome, int)), default=0)
    if errors and any(isinstance(error, BrokenPipeError) for error in (errors[0], errors[0].__cause__)):
        status = 0  # the reader of the output has ended, as in `nmt-translate ... | head`
    else:
        for error in errors:
            report(error, command)
    if errors and joined():  # after an error, the group's threads would abort an orderly exit
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def joined() -> bool:
    """Has this process joined a group, whose members tell each other of errors?"""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _remove_empty_directories() -> None:
    """Remove the directory that Hydra has created for a new run, and its parents (of the date), if they are empty.

    Keeps the directory of a run that the user resumes, and the parents of a directory that the user has named.
    """
    config = HydraConfig.get()
    words = [*job_overrides(config), *job_overrides(config, "hydra")]
    with contextlib.suppress(OSError):
        if not any(word.startswith("run=") for word in words):
            Path(config.run.dir).rmdir()
        if not any(word.startswith("hydra.run.dir=") for word in words):
            os.removedirs(Path(config.run.dir).parent)  # a relative path, so that the working directory stays


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


def output_dir() -> Path:
    """Return Hydra's directory for this job."""
    return Path(HydraConfig.get().runtime.output_dir)


def choices() -> dict[str, str]:
    """Return the selected choice of each group in this job."""
    return choices_of(HydraConfig.get())


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
