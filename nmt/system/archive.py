"""Archives of models: one zip file with a run's weights, configuration, tokenizers and records, to hand on.

An archive may come from anyone. Only files of known names are unpacked, and only as many bytes as are in proportion to
the archive's size. `zipfile` checks sizes and checksums, and never makes links.
"""

import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from nmt.config.errors import UserError, format_value
from nmt.system.files import named_errors, raise_system_error, write_atomically

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
_folders: dict[tuple[int, ...], tempfile.TemporaryDirectory[str]] = {}  # by what identifies a version of a file


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
    """Unpack an archive into a private folder, which is deleted when the process ends, and return the folder.

    Unpacks a file that has not changed only once. Raises UserError, which calls the file `name`, if it is damaged or
    not an archive.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if version not in _folders:
            folder = tempfile.TemporaryDirectory(prefix="nmt-")
            try:
                _unpack(file, Path(folder.name))
            except _RefusedError as error:
                folder.cleanup()
                raise UserError(f"{name}: is not an archive of nmt-export, or is damaged ({error})") from None
            _folders[version] = folder
    return Path(_folders[version].name)


def is_archive(path: Path) -> bool:
    """Does the file begin as a zip file?"""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(4) == b"PK\3\4"
    except OSError:
        return False


def _unpack(file: BinaryIO, folder: Path) -> None:
    """Write the files of an archive. Raises _RefusedError before it writes anything that no archive has, OSError."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise _RefusedError("not a file")
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
