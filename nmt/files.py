"""Files that are whole or not there at all; files and folders that may come from anyone."""

import errno
import fcntl
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

RECORD = 2**26  # bytes that a configuration, a report or a tokenizer may have
TEXT = 2**31  # ... that lines of text may have
CHUNK = 2**22  # ... read at a time


SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO}


def refuse_scarcity(error: Exception) -> None:
    """Raises the error if it is of the system or of permissions: what was to be read is not to blame."""
    if isinstance(error, OSError) and error.errno in SCARCE:
        raise error


def read_bytes(path: Path, most: int = RECORD) -> bytes:
    """A whole file. Raises OSError for more than `most` bytes, before memory is taken, and for what is no file: a pipe
    would keep its reader waiting."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "is not a file", str(path))
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"has {about.st_size:,} bytes, {most:,} are the most", str(path))
        return file.read(most)


def checksum(path: Path) -> int:
    """CRC-32 of a file, which notices bits that have flipped; about a second for a gigabyte."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Errors of the system that name no file, such as those of writing to a full disk, name `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def lines_of(content: bytes) -> list[str]:
    """Lines that end at newlines alone, from UTF-8."""
    text = content.decode("utf-8")
    return text.removesuffix("\n").split("\n") if text else []


def read_lines(path: Path) -> list[str]:
    """Lines that end at newlines alone."""
    return lines_of(read_bytes(path, TEXT))


def refuse_strays(folder: Path) -> None:
    """Raises OSError that names the first link in a folder that leads out of it, or what is neither file nor folder.

    Whoever reads and writes by name within such a folder stays within it.
    """
    inside = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted((*folders, *files))):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue  # of a run that goes on
            if stat.S_ISLNK(mode):
                if os.path.commonpath([inside, os.path.realpath(path)]) != inside:
                    raise OSError(errno.EINVAL, f"is a link that leads out of {folder}", str(path))
            elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(errno.EINVAL, "is neither a file nor a folder", str(path))


def write_atomically(path: Path, write: Callable[[BinaryIO], object] | bytes) -> None:
    """Write beside the path, force it to the disk, then rename: a kill leaves the old file or the new one.

    `write` is the content or a function that writes it. `remove_leftovers` finds what a kill leaves half-written.
    Raises OSError naming the path, such as for a full disk, whatever a library makes of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            if isinstance(write, bytes):
                file.write(write)
            else:
                write(file)
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
        os.fsync(directory)  # the renaming itself
    finally:
        os.close(directory)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is within this block for the folder; a process that ends gives it free."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Each with a newline, atomically."""
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's error behind another one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def remove_leftovers(directory: Path) -> None:
    """Delete what killed writers left half-written in a directory and below. Only where no other process writes."""
    for leftover in directory.rglob(".*.part"):
        leftover.unlink(missing_ok=True)


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON text; numbers that JSON does not have (infinity, not a number) become null."""
    return json.dumps(_finite(values), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
