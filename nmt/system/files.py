"""Atomic writes, bounded reads, and checks of files and folders from untrusted sources."""

import errno
import fcntl
import json
import logging
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MAX_RECORD = 2**26  # bytes of a configuration, a report or a tokenizer
MAX_TEXT = 2**31  # bytes of a text file
UNLOCKABLE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # of a file system without locks, such as some on networks
# Errors of the system or of permissions, which say nothing about the content of a file.
SYSTEM_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO}
log = logging.getLogger(__name__)


def raise_system_error(error: Exception) -> None:
    """Raise the error if it is one of the system or of permissions, rather than of the file's content."""
    if isinstance(error, OSError) and error.errno in SYSTEM_ERRORS:
        raise error


def read_bytes(path: Path, limit: int = MAX_RECORD) -> bytes:
    """Read a whole file. Raises OSError, before it allocates memory, if the file has more than `limit` bytes or is not
    a regular file: reading a pipe might block forever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"has {status.st_size:,} bytes, more than the limit of {limit:,}", str(path))
        return file.read(status.st_size)


def decode_lines(content: bytes) -> list[str]:
    """Split UTF-8 text into lines, at newlines only."""
    text = content.decode("utf-8")
    return text.removesuffix("\n").split("\n") if text else []


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, split at newlines only."""
    return decode_lines(read_bytes(path, MAX_TEXT))


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add `path` to system errors that name no file, such as those of writing to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def check_contained(folder: Path) -> None:
    """Raise OSError if a link in the folder leads outside it, or if the folder holds a pipe or a device."""
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in sorted((*folders, *files))):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue  # removed meanwhile by a run in progress
            if stat.S_ISLNK(mode):
                if os.path.commonpath([root, os.path.realpath(path)]) != root:
                    raise OSError(errno.EINVAL, f"is a link that leads out of {folder}", str(path))
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.EINVAL, "is neither a file nor a folder", str(path))


def write_atomically(path: Path, content: Callable[[BinaryIO], object] | bytes) -> None:
    """Write a temporary file, flush it to disk and rename it: after a kill, `path` has its old or its new content.

    `content` may be a function that writes to the file. `remove_leftovers` deletes the temporary files of killed
    writers. Raises OSError that names `path`, for a full disk even if a library raised another error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        cause = _system_error(error)
        if cause is None or cause.errno is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # makes the rename durable
    finally:
        os.close(directory)


def _system_error(error: BaseException | None) -> OSError | None:
    """Find the first OSError in a chain of exceptions."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines atomically, each with a newline."""
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files that killed writers left in a directory and its subdirectories.

    Call it only while no other process writes there.
    """
    for leftover in directory.rglob(".*.part"):
        leftover.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder. The system releases it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, path: Path) -> bool:
    """Take an exclusive lock on an open file; False if another process holds it.

    Where the file system has no locks, warns and returns True.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it when the process ends
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNLOCKABLE:
            raise
        log.warning(
            "%s: this file system has no locks (%s); start no second process there", path.parent, error.strerror
        )
    return True


def is_locked(path: Path) -> bool:
    """Does a process hold an exclusive lock on the file? A link counts as locked, a missing file does not."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno not in UNLOCKABLE
    return False


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Convert values to JSON; infinite numbers and NaN, which JSON does not have, become null."""
    return json.dumps(_finite(values), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
