"""The run's train.log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nmt.system.distributed import OtherProcessFailed, ProcessGroup


@contextmanager
def log_of_others(group: ProcessGroup, path: Path) -> Iterator[None]:
    """Add the error that ends a group to the run's train.log: on the main process all that it knows of, on another one
    what it could not report."""
    try:
        yield
    except Exception as error:
        if group.size > 1 and path.is_file() and not isinstance(error, OtherProcessFailed):
            name = "" if group.is_main else f"process {group.rank}: "
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR {name}{error}\n")
        raise


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let a full disk end the run, as for every other file, instead of printing a traceback for each line."""
        raise  # noqa: PLE0704


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Copy all log messages to the run's train.log, with the time."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("nmt")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
