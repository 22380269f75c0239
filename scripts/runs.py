"""Functions that are shared by the scripts that start several runs."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from nmt.config.errors import UserError, quoted


def command(name: str) -> str:
    """Return the path of a program in this environment."""
    return str(Path(sys.executable).with_name(name))


def log_path(directory: Path) -> Path:
    """Return the file for a run's output: beside the run's directory, which may hold only the run's own files."""
    return directory.with_suffix(".txt")


def train(directory: Path, overrides: list[str]) -> int:
    """Start or resume a run. Returns its exit status."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with log_path(directory).open("a", encoding="utf-8") as output:
        words = [command("nmt-train"), f"hydra.run.dir={quoted(directory)}", *overrides]
        return subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def finish(directory: Path, overrides: list[str]) -> None:
    """Start or resume a run. Raises UserError if it fails."""
    if train(directory, overrides):
        raise UserError(f"{directory}: failed, see {log_path(directory)}")


def compare(runs: list[Path], output: Path) -> int:
    """Compare runs on the validation set. Returns the exit status."""
    names = ",".join(map(quoted, runs))
    words = [command("nmt-compare"), f"runs=[{names}]", "split=validation", f"output={quoted(output)}"]
    return subprocess.run(words, check=False).returncode


def run_parser(description: str | None, models: int, which: str) -> argparse.ArgumentParser:
    """Create the parser of a script that trains several models by one recipe. `models` is the default of --models, and
    `which` says in the help of --models which models it counts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="+", help="the recipe, as for nmt-train")
    parser.add_argument("--models", type=int, default=models, help=f"number of {which}; seeds count from 1")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; give threads=1 with them")
    return parser


def run_script(work: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser) -> int:
    """Parse the arguments, call `work` with them, and return the exit status. Prints a user's mistake in one line."""
    options = parser.parse_intermixed_args()
    if options.models < 1 or options.jobs < 1:
        parser.error("--models and --jobs must be at least 1")
    return exit_status(parser.prog, lambda: work(options))


def exit_status(program: str, work: Callable[[], int]) -> int:
    """Call `work` and return its status. After a user's mistake, prints it in one line and returns 2. After Ctrl-C,
    returns 130."""
    try:
        return work()
    except (UserError, OSError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command resumes", file=sys.stderr)
        return 130


@contextmanager
def reporting_failure(failures: list[UserError], bar: tqdm) -> Iterator[None]:
    """Report the failure of a thread's work when it happens, and add it to `failures`, which all threads share. If
    `failures` holds one already, raises it again before the work begins."""
    if failures:
        raise failures[0]
    try:
        yield
    except UserError as error:
        failures.append(error)
        bar.write(f"{error}; runs that have started continue")
        raise


def split_overrides(option: str, text: str) -> list[str]:
    """Split an option's value into overrides, as a shell does. Raises UserError if a quote is missing."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {str(error).lower()}") from None
