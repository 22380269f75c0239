"""nmt-train: train, evaluate, draw alignments; with --dry-run, only find mistakes and estimate the cost of a run."""

import os
import shlex
import signal
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

from hydra.types import RunMode

from nmt.cli.compose import RunRequest, as_words, composed, new_run, parse_overrides, resumed_run
from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.launch import in_processes, train
from nmt.cli.run_command import STOPPED, run_command
from nmt.config.errors import UserError, for_shell, override_values
from nmt.system.processes import rank, started_in_group
from nmt.system.run import RunDirectory


def main() -> None:
    run_command("train", _train)


def _train(options: Namespace) -> int:
    """Resume a run, run a sweep, or train a new run, as the command line says. Returns the exit status."""
    if options.shell_completion:
        from nmt.cli.sweep import call_hydra

        call_hydra(["-sc", *options.overrides])
        return 0
    overrides = parse_overrides("train", options.overrides)
    words = as_words(overrides)
    if override_values(words).get("run") is not None and not options.multirun:
        if options.dry_run:
            raise UserError("--dry-run: tries a new run, but run= resumes one; leave one of them out")
        return _run(resumed_run(words))
    config = composed("train", as_words(each for each in overrides if not each.is_sweep_override()))
    if options.multirun or config.hydra.mode == RunMode.MULTIRUN:
        from nmt.cli.sweep import run_sweep

        if options.dry_run:
            raise UserError("--dry-run: tries a single run, but this is a sweep; give each key one value, without -m")
        return run_sweep(config, words)
    request = new_run(words, config)
    return _dry_run(request) if options.dry_run else _run(request)


def _run(request: RunRequest) -> int:
    """Train one run, and print what to do next. Returns the exit status."""
    status = train(request)
    if rank() == 0:
        _print_next_steps(os.path.relpath(request.directory))
    return status


def _print_next_steps(run: str) -> None:
    """Print the folder of pictures, the commands to watch the run and to translate with it, and the run's directory."""
    if os.path.isdir(os.path.join(run, "alignments")):
        print(f"alignments: {os.path.join(run, 'alignments')}")
    if os.path.isdir(os.path.join(run, "tensorboard")):
        print(f"tensorboard: tensorboard --logdir {shlex.quote(run)} --host localhost")
    print(f"translate: nmt-translate {for_shell('run', run)}")
    print(f"run: {run}")


def _dry_run(request: RunRequest) -> int:
    """Try a run in a temporary directory, which is removed unless SIGKILL ends the process. Returns the exit
    status."""
    if started_in_group():
        raise UserError("--dry-run: several processes were started already; start one, with processes=N")
    with exit_at_ctrl_c("train"):  # Ctrl-C during imports ends the process at once: the directory does not exist yet
        from nmt.training.dry_run import dry_run
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exit by exception removes the directory
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit_with_status)
    RunDirectory(request.directory.absolute()).check(request.config.model_dump(mode="json"))
    with tempfile.TemporaryDirectory(prefix="nmt-dry-run-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # for the files of torch and of child processes
        request = request._replace(directory=Path(folder, "run"))
        return in_processes(request.config.processes, "train", dry_run, *request)


def _exit_with_status(number: int, _: object) -> NoReturn:
    sys.exit(STOPPED + number)
