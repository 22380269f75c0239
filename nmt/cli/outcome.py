"""How a command or one of its processes ends: errors of the user in one line, exit status, logging to a stream."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from typing import IO, Any, AnyStr

from omegaconf.errors import OmegaConfBaseException

from nmt.cli.help import explain
from nmt.config.errors import UserError, format_value, printable
from nmt.system.processes import local_rank, rank

MAX_MESSAGE = 500  # characters
STOPPED = 128  # the exit status of a command that signal N stopped is STOPPED + N
# System errors that a user can cause: closed pipes and streams, full disks, missing permissions, unsuitable paths.
USER_ERRNOS = {
    *(errno.EPIPE, errno.EBADF),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
}


def attempt(work: Callable[[], int], debug: bool, clean_up: Callable[[], None] = lambda: None) -> int | Exception:
    """The exit status of a job, or the user's error, after `clean_up` on rank 0. Caught here: Hydra would print its own
    message."""
    try:
        return work()
    except (UserError, OmegaConfBaseException, OSError) as error:
        if debug or (isinstance(error, OSError) and error.errno not in USER_ERRNOS):
            raise
        if rank() == 0:
            clean_up()
        return error
    except (RuntimeError, MemoryError) as error:
        from nmt.system.machine import is_out_of_memory

        if debug or not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        return UserError(f"out of memory ({reason})" if reason else "out of memory")


def report(error: Exception, command: str) -> None:
    """Print an error in one line. Of several processes, the first one prints what all of them meet."""
    name = f"nmt-{command}" if rank() == 0 else f"nmt-{command}, process {rank()}"
    if rank() and ((local_rank() and not joined()) or type(error).__name__ == "OtherProcessFailed"):
        return
    for line in explain(error, command).split("\n"):
        print(f"{name}: error: {format_value(line, MAX_MESSAGE)}", file=sys.stderr)


def joined() -> bool:
    """Has this process joined a group, within which errors are exchanged?"""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def write(stream: IO[AnyStr], content: AnyStr, name: str) -> OSError | None:
    """Write to a stream and flush it. Returns the error, if any, with the stream's name.

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
    # A filter, because tqdm's handler copies filters but no level.
    level = logging.INFO if rank() == 0 else logging.CRITICAL  # only rank 0 logs
    handler.addFilter(lambda record: record.levelno >= level)
    logger = logging.getLogger("nmt")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
