"""What the commands share: they start Hydra, and report a user's mistake as one line with exit status 2."""

import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pydantic import BaseModel

from nmt.cli import arguments
from nmt.cli.compose import job_config
from nmt.cli.outcome import STOPPED, attempt, joined, log_to_stream, report, write
from nmt.config.compose import config_dir
from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import SavedRunCommand
from nmt.system.processes import started_in_group

T = TypeVar("T", bound=BaseModel)
S = TypeVar("S", bound=SavedRunCommand)


def run_command(
    command: str,
    schema: type[T],
    task: Callable[[T, list[str]], int | None],
    sweep: ModuleType | None = None,
    run_dir: Path | None = None,
) -> None:
    """Compose configs/<command>.yaml with the command line's overrides, check it, call `task`, exit.

    `task` takes the typed config and the list of overrides, and returns the exit status (None: 0). `sweep` is the
    module nmt.cli.sweep if the command can run several jobs. `run_dir` takes the place of hydra.run.dir, so that Hydra
    creates no other directory.
    """
    _check_streams(command)
    debug = bool(os.environ.get("HYDRA_FULL_ERROR"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints exceptions itself
    log_to_stream(sys.stderr)
    created: list[Path] = []
    warnings.filterwarnings("error", category=UserWarning, module=r"hydra\.")  # such as a missing search path
    outcomes: list[int | Exception | None] = []  # one per job; None while it runs

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=command)
    def main(config: DictConfig) -> Any:  # noqa: ANN401
        work = partial(_call, schema, task, config, command)
        if sweep is not None and sweep.sweeping():
            return sweep.run_job(work, command)
        outcomes.append(None)
        outcomes[-1] = status = attempt(work, debug, partial(_remove_empty_directories, created))
        if isinstance(status, int) and status >= STOPPED:
            sys.exit(status)
        return None

    try:
        try:
            sys.argv[1:] = arguments.prepared(sys.argv[1:], schema)
            created.extend(arguments.new_folders(sys.argv[1:]))
            arguments.check(sys.argv[1:], command)
            sys.argv[1:] = arguments.with_run_dir(sys.argv[1:], run_dir)
            main()
        except Exception as error:
            if debug or outcomes:  # a bug
                raise
            outcomes.append(_named(error))  # from the command line or a launcher: jobs report their own errors
        if sweep is not None:
            outcomes.append(attempt(sweep.finish, debug))
    except KeyboardInterrupt:
        print(f"nmt-{command}: interrupted", file=sys.stderr)
        outcomes = [STOPPED + signal.SIGINT]
    except SystemExit as exit_:  # after --help and the like, or from a sweep
        outcomes = [int(exit_.code or 0)]
    if unwritten := write(sys.stdout, "", "standard output"):  # perhaps the error that ended the command
        outcomes = [unwritten, *(outcome for outcome in outcomes if getattr(outcome, "errno", None) != unwritten.errno)]
    _exit(outcomes, command)


def _check_streams(command: str) -> None:
    """Refuse a closed standard stream: the next opened file would get its descriptor, and the stream's output.

    Make standard output escape the characters that its encoding lacks.
    """
    streams = {
        "standard input": (sys.stdin, "< /dev/null"),
        "standard output": (sys.stdout, "> /dev/null"),
        "standard error": (sys.stderr, "2> /dev/null"),
    }
    for name, (stream, redirection) in streams.items():
        if stream is None:
            message = f"nmt-{command}: error: {name} is closed; redirect it instead, for example {redirection}"
            print(message, file=sys.stderr or sys.stdout)
            sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _call(schema: type[T], task: Callable[[T, list[str]], int | None], config: DictConfig, command: str) -> int:
    """Run one job. Returns its exit status."""
    return task(job_config(schema, config, command), arguments.job_overrides(HydraConfig.get())) or 0


def shared_by_processes(command: str, task: Callable[[S, list[str]], None]) -> Callable[[S, list[str]], int]:
    """The task of a command that starts itself again in config.processes processes, which share its work."""

    def run(config: S, overrides: list[str]) -> int:
        if config.processes > 1 and started_in_group():
            raise UserError("processes=: several processes were started already; leave it out")
        if config.processes > 1:
            from nmt.cli.launch import repeat_in_processes

            return repeat_in_processes(command, config.processes)
        task(config, overrides)
        return 0

    return run


def _named(error: Exception) -> Exception:
    """Name standard output in a system error without a file name: Hydra prints --help and the like there."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = "standard output"
    return error


def _exit(outcomes: list[int | Exception | None], command: str) -> None:
    """Print each error in one line and exit: with 2 after an error, else with the highest status."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    status = 2 if errors else max((outcome for outcome in outcomes if isinstance(outcome, int)), default=0)
    if errors and any(isinstance(error, BrokenPipeError) for error in (errors[0], errors[0].__cause__)):
        status = 0  # the reader has left, as in `nmt-translate ... | head`
    else:
        for error in errors:
            report(error, command)
    if errors and joined():  # the threads of a group that an error has ended would abort an orderly exit
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _remove_empty_directories(created: list[Path]) -> None:
    """Remove the run directory that Hydra creates before the job starts, unless it existed before or holds files."""
    config = HydraConfig.get()
    if config.run.dir == "." or any(word.startswith("run=") for word in arguments.job_overrides(config)):
        return
    named = any(word.startswith("hydra.run.dir=") for word in arguments.job_overrides(config, "hydra"))
    with contextlib.suppress(OSError):
        if not named:
            os.removedirs(config.run.dir)  # with the folders of its date
        for path in created:
            path.rmdir()


def output_dir() -> Path:
    """Hydra's directory for this job."""
    return Path(HydraConfig.get().runtime.output_dir)


def choices() -> dict[str, str]:
    """The selected choice of each group in this job."""
    selected = HydraConfig.get().runtime.choices
    return {str(group): str(choice) for group, choice in selected.items() if not str(group).startswith("hydra/")}


@contextlib.contextmanager
def output_folder(output: str, marker: str, content: str, option: str = "output=") -> Iterator[Path]:
    """The folder `output`, created if missing. If the body raises, new folders that are empty are removed again.

    Raises UserError if the folder cannot be created or written, or if it holds files but not `marker`, by which an
    earlier result is recognised. In messages, `option` names the argument and `content` the kind of result.
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
