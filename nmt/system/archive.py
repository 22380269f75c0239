"""Archives of models: one zip file with a run's weights, configuration, tokenizers and records, to hand on.

An archive may come from anyone. Only files of known names are unpacked, into a folder of the cache that is named after
the SHA-256 of the archive's bytes, and only as many bytes as are in proportion to the archive's size. `zipfile` checks
the rest: sizes, checksums and methods of packing. It never makes links.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nmt.config.errors import UserError, format_value
from nmt.config.overrides import user_path
from nmt.system.files import locked, named_errors, raise_system_error, write_atomically

CARD, CONFIG, WEIGHTS = "README.md", "config.yaml", "checkpoints/best.safetensors"
NAMES = re.compile(  # of the files in an archive
    rf"{re.escape(CARD)}|{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|shortlist\.safetensors|attention-[1-9]\d?\.png"
    r"|(manifest|results)\.json|(tokenizer|source|target)\.model"
    r"|(data/S\.(source|target|alignments)|hypotheses/S\.txt"
    r"|alignments/S\.((references|translations)\.pharaoh|words\.jsonl))".replace("S", "(validation|test)")
)
MAX_PICTURES = 99
# Entries that zip programs add when somebody packs an archive again.
FOLDERS = {"checkpoints/", "data/", "hypotheses/", "alignments/"}
MAX_RATIO, ALLOWANCE = 10, 2**20  # unpacked bytes: at most so many for each byte of the archive, and some more
PACKED = (".safetensors", ".png")  # do not become smaller
EPOCH = (1980, 1, 1, 0, 0, 0)  # the time of all entries, so that equal content gives equal bytes
KEPT = 24 * 3600  # seconds that a half-unpacked folder is left alone: another machine may be writing it
_private: dict[str, tempfile.TemporaryDirectory[str]] = {}  # by digest; removed when the process ends


class _RefusedError(ValueError):
    """Why a file is not an archive."""


def write_archive(path: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by name, atomically. Equal contents give equal bytes. Raises OSError."""
    assert all(map(NAMES.fullmatch, contents))
    incompressible = sum(len(content) for name, content in contents.items() if name.endswith(PACKED))
    total = sum(map(len, contents.values()))

    def pack(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in contents.items():
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                # Text that packs too well is stored, or `unpacked` would refuse the archive.
                packed = name.endswith(PACKED) or total > MAX_RATIO * incompressible + ALLOWANCE
                entry.compress_type = zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED
                archive.writestr(entry, content)

    write_atomically(path, pack)


def unpacked(path: Path, name: str) -> Path:
    """Unpack an archive at the first call, and return the folder that holds its content.

    It lies in NMT_CACHE, or else in the user's cache; if that cannot be written, in a private folder that is deleted
    when the process ends. Raises UserError, which calls the file `name`, if it is damaged or not an archive.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    try:
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _RefusedError("not a file")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest in _private:
                return Path(_private[digest].name)
            root = _cache()
            with suppress(OSError):
                if root is not None:
                    return _in_cache(file, root, digest)
            private = tempfile.TemporaryDirectory(prefix="nmt-")
            _unpack(file, Path(private.name))
            _private[digest] = private
            return Path(private.name)
    except _RefusedError as error:
        raise UserError(f"{name}: is not an archive of nmt-export, or is damaged ({error})") from None


def is_archive(path: Path) -> bool:
    """Does the file begin as a zip file?"""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(4) == b"PK\3\4"
    except OSError:
        return False


def _cache() -> Path | None:
    """Return the folder of all unpacked archives; None without a home directory."""
    with suppress(UserError):
        if folder := os.environ.get("NMT_CACHE"):
            return user_path(folder) / "archives"
        base = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else user_path("~/.cache")) / "nmt" / "archives"
    return None


def _in_cache(file: BinaryIO, root: Path, digest: str) -> Path:
    """Unpack an archive into its folder in the cache. Raises OSError if the cache cannot be used."""
    folder = root / digest
    if _is_own(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        if _is_own(folder):  # another process was faster
            return folder
        _remove_leftovers(root)
        working = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=root))
        try:
            _unpack(file, working)
            with suppress(OSError):  # where folders cannot be locked, another process may have been faster still
                working.rename(folder)
        finally:
            shutil.rmtree(working, ignore_errors=True)
    if not _is_own(folder):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(folder))
    return folder


def _is_own(folder: Path) -> bool:
    """Does this user own the folder? Anybody may write to a shared cache."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove_leftovers(root: Path) -> None:
    """Delete half-unpacked folders of killed processes."""
    for leftover in root.glob(".*.part"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > KEPT:
                shutil.rmtree(leftover, ignore_errors=True)


def _unpack(file: BinaryIO, folder: Path) -> None:
    """Write the files of an archive. Raises _RefusedError before it writes anything that no archive has, OSError."""
    try:
        archive = zipfile.ZipFile(file)
        entries = _entries(archive, os.fstat(file.fileno()).st_size)
    except _RefusedError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise_system_error(error)
        raise _RefusedError(_reason(error)) from None
    for entry in entries:
        path = folder / entry.filename
        path.parent.mkdir(exist_ok=True)
        try:
            with archive.open(entry) as content, path.open("wb") as output, named_errors(path):
                shutil.copyfileobj(content, output)
                output.flush()
                os.fsync(output.fileno())
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: it is encrypted
            raise _RefusedError(f"{entry.filename}: {_reason(error)}") from None


def _entries(archive: zipfile.ZipFile, size: int) -> list[zipfile.ZipInfo]:
    """Check and list the files to unpack from an archive of `size` bytes. Raises _RefusedError."""
    entries = [entry for entry in archive.infolist() if entry.filename not in FOLDERS]
    names = {entry.filename for entry in entries}
    for entry in entries:
        if not NAMES.fullmatch(entry.filename):
            raise _RefusedError(f"it holds {format_value(entry.filename)}, which no archive has")
        if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise _RefusedError(f"{entry.filename} is packed in a way that is not supported")
    if missing := {CONFIG, WEIGHTS} - names:
        raise _RefusedError(f"it has no {min(missing)}")
    total = sum(entry.file_size for entry in entries)
    if total > MAX_RATIO * size + ALLOWANCE:
        raise _RefusedError(f"its {size:,} bytes would become {total:,}")
    return entries


def _reason(error: Exception) -> str:
    return format_value(str(error).partition("\n")[0] or type(error).__name__)
