"""What the four commands share: Hydra composes, a mistake is one line and exit status 2."""

import contextlib
import errno
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from nmt.cli import help, size, words
from nmt.cli.explain import explain
from nmt.cli.output import write
from nmt.config.compose import config_dir, drop_unused_values, typed
from nmt.config.errors import UserError, format_value, printable
from nmt.config.overrides import user_path

T = TypeVar("T", bound=BaseModel)
LONGEST = 500  # characters of a message
STOPPED = 128  # plus its number: exit status after a signal
log = logging.getLogger(__name__)


class Sweep(Protocol):
    """How a command runs several jobs (nmt.cli.sweep)."""

    def sweeping(self) -> bool:
        """Is this one job of several?"""

    def run_job(self, work: Callable[[], int], command: str) -> Any:  # noqa: ANN401
        """One job, perhaps in another process. Raises nothing that is its own fault."""

    def finish(self) -> int:
        """After the last job. Returns the exit status."""


def run_command(
    command: str, schema: type[T], task: Callable[[T, list[str]], int | None], sweep: Sweep | None = None
) -> None:
    """Compose configs/<command>.yaml with the command line's overrides, check it, call `task`, exit.

    `task` gets the typed config and the list of overrides, and returns the exit status (None: 0).
    """
    _check_streams(command)
    debug = bool(os.environ.get("HYDRA_FULL_ERROR"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions come up to us instead of being printed by Hydra
    log_to(sys.stderr)
    new: list[Path] = []
    warnings.filterwarnings("error", category=UserWarning, module=r"hydra\.")  # such as of a path that is not there
    outcomes: list[int | Exception | None] = []  # of each job; None while it runs

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=command)
    def main(config: DictConfig) -> Any:  # noqa: ANN401
        if sweep is not None and sweep.sweeping():
            return sweep.run_job(partial(_call, schema, task, config, command), command)
        outcomes.append(None)
        outcomes[-1] = status = _attempt(partial(_call, schema, task, config, command), debug, new)
        if isinstance(status, int) and status >= STOPPED:  # by a signal, which means the whole sweep
            sys.exit(status)
        return None

    try:
        try:
            sys.argv[1:] = [words.with_home(word) for word in sys.argv[1:]]
            new.extend(words.new_folders(sys.argv[1:]))
            words.check(sys.argv[1:], command)
            with _naming_standard_output():
                main()
        except Exception as error:
            if debug or outcomes:  # a fault of the program
                raise
            outcomes.append(error)  # the command line is at fault, or a launcher: jobs tell their own
        if sweep is not None:
            outcomes.append(_attempt(sweep.finish, debug))
    except KeyboardInterrupt:
        print(f"nmt-{command}: interrupted", file=sys.stderr)
        outcomes = [STOPPED + signal.SIGINT]
    except SystemExit as end:  # after --help and the like, or of a sweep
        outcomes = [int(end.code or 0)]
    if unwritten := write(sys.stdout, "", "standard output"):  # may have ended the command already
        outcomes = [unwritten, *(each for each in outcomes if getattr(each, "errno", None) != unwritten.errno)]
    _exit(outcomes, command)


def _check_streams(command: str) -> None:
    """Refuse a closed standard stream: the next file that is opened would get its number, and what is meant for the
    stream. Escape the characters that standard output's encoding lacks."""
    streams = {
        "standard input": (sys.stdin, "< /dev/null"),
        "standard output": (sys.stdout, "> /dev/null"),
        "standard error": (sys.stderr, "2> /dev/null"),
    }
    for name, (stream, instead) in streams.items():
        if stream is None:
            message = f"nmt-{command}: error: {name} is closed; redirect it instead, for example {instead}"
            print(message, file=sys.stderr or sys.stdout)
            sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _naming_standard_output() -> Iterator[None]:
    """Name it in the system's error where Hydra prints --help and the like, which may not fit into its buffer."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = "standard output"
        raise


def _call(schema: type[T], task: Callable[[T, list[str]], int | None], config: DictConfig, command: str) -> int:
    """One job. Returns its exit status."""
    given = words.given(HydraConfig.get())
    values = OmegaConf.to_container(size.settle(config, command), resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return task(typed(schema, drop_unused_values(schema, cast(dict[str, Any], values), given)), given) or 0


def _attempt(work: Callable[[], int], debug: bool, new: list[Path] | None = None) -> int | Exception:
    """The exit status, or the user's fault: kept from Hydra, which would print a notice of its own."""
    try:
        return work()
    except (UserError, OmegaConfBaseException, OSError) as error:
        if debug or not _users_fault(error):
            raise
        if new is not None:
            _remove_new_directory(new)
        return error
    except (RuntimeError, MemoryError) as error:
        from nmt.machine import is_out_of_memory

        if debug or not is_out_of_memory(error):
            raise
        return UserError(f"memory does not suffice ({str(error).partition(chr(10))[0] or 'it is full'})")


def _exit(outcomes: list[int | Exception | None], command: str) -> None:
    """Tell each job's failure in one line, and exit: 2 if there was one, else the highest status."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures and isinstance(failures[0], BrokenPipeError):  # the reader has left, as in `nmt-translate ... | head`
        sys.exit(0)
    for failure in failures:
        for line in explain(failure, command).split("\n"):
            print(f"nmt-{command}: error: {format_value(line, LONGEST)}", file=sys.stderr)
    sys.exit(2 if failures else max((outcome for outcome in outcomes if isinstance(outcome, int)), default=0))


# Of the system's errors, those that are not the program's: readers that left or streams that are open the other way, no
# room, no permission, odd files.
_OUTSIDE = {
    *(errno.EPIPE, errno.EBADF),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
}


def _users_fault(error: Exception) -> bool:
    return not isinstance(error, OSError) or error.errno in _OUTSIDE


def _remove_new_directory(new: list[Path]) -> None:
    """Hydra makes a run's directory before we are asked: an empty one is of no use, unless it was there (not `new`)."""
    config = HydraConfig.get()
    named = any(word.startswith("hydra.run.dir=") for word in words.given(config, "hydra"))
    if config.run.dir == "." or any(word.startswith("run=") for word in words.given(config)):
        return
    with contextlib.suppress(OSError):
        if not named:
            os.removedirs(config.run.dir)  # with the folders of its date, where they are empty too
        for place in new:
            place.rmdir()


def output_dir() -> Path:
    """Hydra's directory for this job."""
    return Path(HydraConfig.get().runtime.output_dir)


def choices() -> dict[str, str]:
    """What was chosen from each group of this job."""
    chosen = HydraConfig.get().runtime.choices
    return {str(group): str(choice) for group, choice in chosen.items() if not str(group).startswith("hydra/")}


def _run_dir(run: str | int | None, new: str) -> str:
    """The directory of a run that is resumed, else a new one. Raises UserError before anything is made."""
    if run is None:
        return new
    run = str(run)
    if not user_path(run).is_dir():
        raise UserError(
            f"run={format_value(run)}: no such directory; run= resumes a run, hydra.run.dir= names a new one"
        )
    return str(user_path(run))


def _for_several(run: str | float | list[str] | None, place: str) -> str | None:
    """A place for what is of several runs together; None where there is but one."""
    return None if run is None or isinstance(run, str | int | float) or len(run) == 1 else place


# At import, since a launcher's worker process imports this module and nothing else of the command.
OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
OmegaConf.register_new_resolver("choices", help.all_choices, replace=True)
OmegaConf.register_new_resolver("values", help.values, replace=True)
OmegaConf.register_new_resolver("for_several", _for_several, replace=True)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Names and errors in a message may come from others' files."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def log_to(stream: Any) -> None:  # noqa: ANN401
    """Let all that is told go to this stream, and nowhere else but to files."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Printable("%(message)s"))
    logger = logging.getLogger("nmt")
    handler.addFilter(lambda record: record.levelno >= logging.INFO)  # a filter also holds beside a progress bar
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
