"""Atomic writes, bounded reads, locks, and archives of models.

An archive may come from anyone. Only files of known names are unpacked, and the unpacked size is limited in proportion
to the archive's size. `zipfile` checks sizes and checksums, and never makes links.
"""

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO

from nmt.config.errors import UserError, format_value

MAX_RECORD = 2**26  # most bytes that are read of a configuration, a report or a tokenizer
MAX_TEXT = 2**31  # most bytes that are read of a text file
# Errors of locking on a file system that has no locks, such as some network file systems.
UNLOCKABLE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
# Errors of the system or of permissions, which say nothing about the content of a file.
SYSTEM_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOSPC}
log = logging.getLogger(__name__)


def reraise_if_system_error(error: Exception) -> None:
    """Raise the error again if it comes from the system or from permissions; return if the file's content caused it."""
    if isinstance(error, OSError) and error.errno in SYSTEM_ERRORS:
        raise error


def read_bytes(path: Path, limit: int = MAX_RECORD) -> bytes:
    """Read a whole file. Raises OSError, before it allocates memory, if the file has more than `limit` bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"has {size:,} bytes, more than the limit of {limit:,}", str(path))
        return file.read()


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


def write_atomically(path: Path, content: Callable[[BinaryIO], object] | bytes) -> None:
    """Write a file so that after a kill, `path` has its old or its new content.

    Writes a temporary file, flushes it to disk and renames it. `remove_leftovers` deletes the temporary file after a
    kill. `content` may be a function that writes to the file. Raises OSError that names `path`, also where a library
    turned the system's error, such as a full disk, into another exception.
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
    """Return the first OSError in a chain of exceptions and their causes, or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines atomically, each with a newline."""
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders at any depth in a folder, itself included, each with the names of its files. Follows links to
    folders, as users collect runs and corpora by links. Enters each folder once, whatever leads to it."""
    entered, roots = set(), [folder]
    for root in roots:  # links are appended, so that a folder has its own path rather than that of a link to it
        for parent, folders, files in os.walk(root):
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in entered:
                folders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            roots += [path for name in sorted(folders) if (path := Path(parent, name)).is_symlink()]
            yield Path(parent), files


def folders_with(folder: Path, *names: str) -> list[Path]:
    """Find the folders, at any depth in a folder, that have a file of one of these names, sorted by path. Follows
    links as `walk` does."""
    return sorted(parent for parent, files in walk(folder) if not set(names).isdisjoint(files))


def short_name(text: str, longest: int) -> str:
    """Turn a text into a file's name of at most `longest` ASCII characters that needs no quotes in a shell. Where
    characters are replaced or cut off, a digest of the text is appended, so that names stay distinct."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:6]
    plain = re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII)
    if plain != text:
        plain = f"{plain}-{digest}"
    return plain if len(plain) <= longest else f"{plain[: longest - 7]}-{digest}"


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files that killed writers left in a directory and its subdirectories. Call it only while no
    other process writes there."""
    for leftover in directory.rglob(".*.part"):
        leftover.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder within the context; waits for other holders. The system releases the lock
    when the process ends. Where the file system has no locks, does nothing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, path: Path) -> bool:
    """Take an exclusive lock on the open file `descriptor`, without waiting. Returns False if another process holds it.
    Where the file system has no locks, warns and returns True."""
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
    """Does a process hold an exclusive lock on the file? False if the file is missing or its file system has no locks;
    True if it cannot be opened."""
    try:
        with path.open("r+b") as file:  # NFS gives an exclusive lock only on a file that is open for writing
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


# Archives: one zip file with a run's parameters, configuration, tokenizers and records, to pass on to others

CARD, CONFIG, WEIGHTS = "README.md", "config.yaml", "checkpoints/best.safetensors"
NAMES = re.compile(  # allowed names of the files in an archive
    rf"{re.escape(CARD)}|{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|shortlist\.safetensors|attention-[1-9]\d?\.png"
    r"|(manifest|results)\.json|(tokenizer|source|target)\.model"
    r"|(data/S\.(source|target|alignments)|hypotheses/S\.txt"
    r"|alignments/S\.((references|translations)\.pharaoh|words\.jsonl))".replace("S", "(validation|test)")
)
MAX_PICTURES = 99
# Entries for folders, which zip programs add when somebody unpacks and packs an archive again. They are skipped.
FOLDERS = {"checkpoints/", "data/", "hypotheses/", "alignments/"}
MAX_RATIO, ALLOWANCE = 10, 2**20  # the files may unpack to MAX_RATIO * bytes of the archive + ALLOWANCE bytes
INCOMPRESSIBLE = (".safetensors", ".png")  # kinds of files that compression does not make smaller
EPOCH = (1980, 1, 1, 0, 0, 0)  # the time stamp of all entries, so that equal content gives equal bytes
# (device, inode, size, modification time) of an archive -> the folder with its files.
_folders: dict[tuple[int, ...], tempfile.TemporaryDirectory[str]] = {}


def write_archive(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write an archive atomically; `contents` maps names to bytes. Equal contents give equal bytes. Raises OSError."""
    assert all(map(NAMES.fullmatch, contents))
    incompressible = sum(len(content) for name, content in contents.items() if name.endswith(INCOMPRESSIBLE))
    total = sum(map(len, contents.values()))

    def pack(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in contents.items():
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                # If compression could make the archive so small that `unpacked` refuses it, nothing is compressed.
                stored = name.endswith(INCOMPRESSIBLE) or total > MAX_RATIO * incompressible + ALLOWANCE
                entry.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)

    write_atomically(path, pack)


def unpacked(path: Path, name: str) -> Path:
    """Unpack an archive into a private folder, which is deleted when the process ends, and return the folder.

    A second call for the same, unchanged file returns the same folder. Raises UserError, which calls the file `name`,
    if it cannot be read, is damaged or is not an archive.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    with file:
        status = os.fstat(file.fileno())
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if version not in _folders:
            folder = tempfile.TemporaryDirectory(prefix="nmt-")
            try:
                _unpack(zipfile.ZipFile(file), status.st_size, Path(folder.name))
            except Exception as error:  # a damaged file can raise nearly anything
                folder.cleanup()
                reraise_if_system_error(error)
                reason = format_value(str(error).partition("\n")[0] or type(error).__name__)
                raise UserError(f"{name}: is not an archive of nmt-export, or is damaged ({reason})") from None
            _folders[version] = folder
    return Path(_folders[version].name)


def is_archive(path: Path) -> bool:
    """Is the path that of a zip file?"""
    return path.is_file() and zipfile.is_zipfile(path)


def _unpack(archive: zipfile.ZipFile, size: int, folder: Path) -> None:
    """Write the files of an archive of `size` bytes into a folder. Raises ValueError, before the first file is written,
    if the archive would be too large, or has a file whose name is not in NAMES."""
    entries = [entry for entry in archive.infolist() if entry.filename not in FOLDERS]
    names = {entry.filename for entry in entries}
    if other := next((name for name in names if not NAMES.fullmatch(name)), None):
        raise ValueError(f"it holds {format_value(other)}, which no archive has")
    if missing := {CONFIG, WEIGHTS} - names:
        raise ValueError(f"it has no {min(missing)}")
    total = sum(entry.file_size for entry in entries)
    if total > MAX_RATIO * size + ALLOWANCE:
        raise ValueError(f"its {size:,} bytes would become {total:,}")
    for entry in entries:
        path = folder / entry.filename
        path.parent.mkdir(exist_ok=True)
        with archive.open(entry) as content, path.open("wb") as output, named_errors(path):
            shutil.copyfileobj(content, output)


def write(stream: IO[AnyStr], content: AnyStr, name: str) -> OSError | None:
    """Write to a stream and flush it. Returns the error, if any, with `name` as its file name.

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
