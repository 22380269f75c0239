"""What all commands share: print what --help asks for, report a mistake in one line, end with an exit status, log."""

import io
import logging
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

from omegaconf import OmegaConf
from pydantic import BaseModel

from nmt import DISTRIBUTION
from nmt.cli.compose import as_words, compose, composed, explained, parse_arguments, parse_overrides, without_hydra
from nmt.cli.config_files import help_text
from nmt.cli.hydra_errors import explain
from nmt.config.errors import UserError, format_value, override_values, printable
from nmt.system.files import write
from nmt.system.processes import joined, leave, leave_group, local_rank, rank

MAX_MESSAGE = 500  # characters of a line of an error message; longer lines are cut
T = TypeVar("T", bound=BaseModel)
STOPPED = 128  # the exit status of a command that signal N stopped is STOPPED + N


def run_configured(command: str, schema: type[T], work: Callable[[T], int | None]) -> NoReturn:
    """Call `work` with the typed configuration of a command, as `run_command` does with its options."""
    run_command(command, lambda options: work(compose(command, schema, options.overrides)))


def run_command(
    command: str, work: Callable[[Namespace], int | None], arguments: Sequence[str] | None = None
) -> NoReturn:
    """Call `work` with the options of the command line, report an error in one line, and exit.

    `work` returns the exit status, or None for 0. `arguments` replaces sys.argv[1:].
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    outcome: int | Exception
    try:
        outcome = attempt(lambda: _inform_or_work(command, work, arguments))
    except KeyboardInterrupt:
        print(f"nmt-{command}: interrupted", file=sys.stderr)
        outcome = STOPPED + signal.SIGINT
    except SystemExit as exit_:  # at a signal that stopped the job
        outcome = int(exit_.code or 0)
    unwritten = write(sys.stdout, "", "standard output")
    outcome = outcome if isinstance(outcome, Exception) else unwritten or outcome
    if isinstance(outcome, int):
        sys.exit(outcome)
    status = 0 if is_unread(outcome) else 2
    if status:
        report(outcome, command)
    if joined():  # the group's threads would abort an orderly exit
        leave(status)
    sys.exit(status)


def _inform_or_work(command: str, work: Callable[[Namespace], int | None], arguments: Sequence[str] | None) -> int:
    """Print the text that an option such as --help asks for, or else do the work. Returns the exit status."""
    try:
        log_to_stream(sys.stderr)
    except UserError:  # variables of a group that no launcher would set
        leave_group()  # so that the error can be reported
        raise
    options = parse_arguments(command, sys.argv[1:] if arguments is None else arguments)
    if options.version:
        text = f"nmt {version(DISTRIBUTION)} (Hydra {version('hydra-core')})\n"
    elif options.help:
        text = help_text(command, override_values(options.overrides))
    elif options.cfg:
        words = as_words(parse_overrides(command, options.overrides))
        with explained(command, words):  # a reference may fail to resolve
            text = OmegaConf.to_yaml(without_hydra(composed(command, words)), resolve=options.resolve)
    else:
        return work(options) or 0
    if error := write(sys.stdout, text, "standard output"):
        raise error
    return 0


def attempt(work: Callable[[], int]) -> int | Exception:
    """Call `work`. Return its exit status, or the error that it raises if a user can cause such an error.

    Raises all other errors. Running out of memory is returned as a UserError.
    """
    try:
        return work()
    except (UserError, OSError) as error:
        return error
    except (RuntimeError, MemoryError) as error:
        from nmt.system.machine import is_out_of_memory

        if not is_out_of_memory(error):
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


def is_unread(error: Exception) -> bool:
    """Has the reader of the output ended, as in `nmt-translate ... | head`? That is no mistake."""
    return any(isinstance(each, BrokenPipeError) for each in (error, error.__cause__))


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Escape control characters, because names and errors in a message may come from files of strangers."""
        return "\n".join(map(printable, super().format(record).split("\n")))


def log_to_stream(stream: Any) -> None:  # noqa: ANN401
    """Send the package's log messages to this stream only."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Printable())
    # Use a filter instead of a level: the handler that tqdm puts in place copies only filters.
    level = logging.INFO if rank() == 0 else logging.CRITICAL  # only rank 0 logs
    handler.addFilter(lambda record: record.levelno >= level)
    logger = logging.getLogger("nmt")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
