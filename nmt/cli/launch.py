"""A command in several processes of this machine, by torch's elastic launcher: what processes=N does."""

import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nmt.cli.app import STOPPED, attempt, log_to_stream, report
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.processes import cores
from nmt.training.job import train
from nmt.training.trainer import Observer


def train_in_processes(
    config: TrainConfig,
    directory: Path,
    overrides: list[str],
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
    job: Callable[..., int] = train,
) -> int:
    """`job`, which takes the other arguments, in config.processes processes. Returns the exit status."""
    try:
        return _launch(config.processes, _run, job, config, directory, overrides, choices, observer)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        reason = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"status {failure.exitcode}"
        raise UserError(f"process {failure.local_rank} ended with {reason}; the checkpoints are intact") from None


def repeat_in_processes(command: str, processes: int) -> int:
    """This command line in several processes, which share the standard streams. Returns the exit status; errors were
    printed."""
    words = [word for word in sys.argv[1:] if not word.startswith("processes=")]
    os.environ.pop("HYDRA_FULL_ERROR", None)  # set by this process; the others print errors in one line, too
    start = f"from nmt.cli.entry import {command}; {command}()"
    try:
        return _launch(processes, sys.executable, "-c", start, *words)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise UserError(f"process {failure.local_rank} ended with signal {-failure.exitcode}") from None
        return int(failure.exitcode)


def _launch(processes: int, work: Callable[..., int] | str, *arguments: Any) -> int:  # noqa: ANN401
    """The highest status that the processes return. Raises ChildFailedError if one fails."""
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # it would announce signals and failures itself
    with _threads_per_process(processes):
        try:
            statuses: dict[int, int | None] = elastic_launch(settings, work)(*arguments)
        except SignalException as stop:
            return STOPPED + int(stop.sigval)
    return max(status or 0 for status in statuses.values())


@contextmanager
def _threads_per_process(processes: int) -> Iterator[None]:
    """Within this context, new processes divide the cores among them, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def _run(job: Callable[..., int], *arguments: Any) -> int:  # noqa: ANN401
    """One of the processes. Returns the exit status; an error was printed."""
    log_to_stream(sys.stderr)
    outcome = attempt(partial(job, *arguments), debug=False)
    if isinstance(outcome, Exception):
        report(outcome, "train")
        return 2
    return outcome
