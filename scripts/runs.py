"""What the scripts share that start several runs."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.config.overrides import quoted


def command(name: str) -> str:
    """A program of this environment."""
    return str(Path(sys.executable).with_name(name))


def printed(directory: Path) -> Path:
    """What a run printed: beside it, since a directory that holds anything else is no run's."""
    return directory.with_suffix(".txt")


def train(directory: Path, overrides: list[str]) -> int:
    """One run, or the rest of it. Returns its exit status."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with printed(directory).open("a", encoding="utf-8") as output:
        words = [command("nmt-train"), f"hydra.run.dir={quoted(directory)}", *overrides]
        return subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def finish(directory: Path, overrides: list[str]) -> None:
    """The same. Raises UserError if it fails."""
    if train(directory, overrides):
        raise UserError(f"{directory}: failed, see {printed(directory)}")


def several(about: str | None, models: int, which: str) -> argparse.ArgumentParser:
    """The arguments of a script that trains several models by one recipe."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="+", help="the recipe, as for nmt-train")
    parser.add_argument("--models", type=int, default=models, help=f"{which}; seeds from 1 on")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; give threads=1 with them")
    return parser


def call(work: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser) -> int:
    """`work` with the arguments that are given. Returns the exit status."""
    options = parser.parse_intermixed_args()
    if options.models < 1 or options.jobs < 1:
        parser.error("--models and --jobs must be at least 1")
    try:
        return work(options)
    except (UserError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130


@contextmanager
def told(pool: ThreadPoolExecutor, bar: tqdm) -> Iterator[None]:
    """For what the pool does: a failure is told when it happens, and nothing is begun after it."""
    try:
        yield
    except UserError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        bar.write(f"{error}; what has begun goes on")
        raise


def split(option: str, text: str) -> list[str]:
    """The overrides that an option holds, as a shell would split them. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {str(error).lower()}") from None
