"""nmt-train --dry-run: finds what would stop a run, and estimates its time and memory."""

import errno
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

from nmt.cli import arguments, sweep
from nmt.cli.app import choices, output_dir, run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.outcome import STOPPED
from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import TrainConfig
from nmt.system.processes import started_in_group

SWEEP = "--dry-run: tries a single run, but this is a sweep; give each key one value, without -m"


def main() -> None:
    """Runs in place of nmt-train. Works in a temporary directory, which only SIGKILL leaves behind."""
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != arguments.DRY_RUN]
    sweep.NameJobs.refusal = SWEEP
    with exit_at_ctrl_c("train"):
        import nmt.cli.launch  # an interrupted import ends the process, without removing anything
        import nmt.training.job  # noqa: F401
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)
    named = [arguments.value_of(word) for word in sys.argv[1:] if word.startswith("hydra.run.dir=")]
    with tempfile.TemporaryDirectory(prefix="nmt-dry-run-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # for the files of torch and of child processes
        task = partial(_dry_run, named=named[-1] if named else None)
        run_command("train", TrainConfig, task, sweep, Path(folder, "run"))


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(STOPPED + number)


def _dry_run(config: TrainConfig, overrides: list[str], named: str | None) -> int:
    """named: the run's directory; Hydra's is the temporary one."""
    from nmt.cli.launch import train_in_processes
    from nmt.training.job import dry_run

    if config.run is not None:
        raise UserError(f"--dry-run: tries a new run, but run={config.run} resumes one; leave one of them out")
    if started_in_group():
        raise UserError("--dry-run: several processes were started already; start one, with processes=N")
    config = config.with_absolute_paths()
    _check_directory(config, None if named is None or "${" in named else user_path(named))
    launch = partial(train_in_processes, job=dry_run) if config.processes > 1 else dry_run
    return launch(config, output_dir(), overrides, choices(), None)


def _check_directory(config: TrainConfig, path: Path | None) -> None:
    """Raises UserError or OSError if a run could not be written to `path` (None: where nmt-train puts runs)."""
    from nmt.system.run import RunDirectory

    folder = (path or Path("outputs")).absolute()
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
    if path is not None:
        RunDirectory(path.absolute()).check(config.model_dump(mode="json"))
