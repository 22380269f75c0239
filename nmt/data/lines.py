"""Lines of a text file, plain or gzipped, as the user keeps it."""

import gzip
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from nmt.config.errors import UserError

BOM = b"\xef\xbb\xbf"
FORMATS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"PK\x03\x04": "zip"}


def read_lines(path: Path) -> Iterator[str]:
    """Lines without their end. Raises UserError, with the line, for what is not UTF-8."""
    return cast(Iterator[str], _decoded(path, drop=False, remedy="convert the file"))


def read_some_lines(path: Path, drop: bool) -> Iterator[str | None]:
    """Like `read_lines`, or with `drop` None for each line that is not UTF-8."""
    return _decoded(path, drop, "convert the file, or drop such pairs with data.invalid_utf8=drop")


def _decoded(path: Path, drop: bool, remedy: str) -> Iterator[str | None]:
    """Lines end at "\\n" alone, with or without a carriage return before it."""
    opening = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with cast(BinaryIO, opening(path, "rb")) as file:
            for number, raw in enumerate(file, 1):
                line = raw.removesuffix(b"\n").removesuffix(b"\r")
                if number == 1:
                    _refuse_other_formats(path, line)
                    if b"\r" in line and not raw.endswith(b"\n"):
                        name = shlex.quote(str(path))
                        raise UserError(
                            f"{path}: its lines end in carriage returns alone, as on the first Macs; convert it: "
                            f"tr '\\r' '\\n' < {name} > NEW"
                        )
                    line = line.removeprefix(BOM)
                try:
                    yield line.decode("utf-8")
                except UnicodeDecodeError as error:
                    if not drop:
                        at = f"byte {error.start + 1} of the line"
                        raise UserError(f"{path}, line {number}: not valid UTF-8 ({at}); {remedy}") from None
                    yield None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}, after line {number}: cannot be read ({first_line(error)})") from None
    if number == 0:
        raise UserError(f"{path}: is empty")


def _refuse_other_formats(path: Path, line: bytes) -> None:
    """Raises UserError for a file whose first line begins like that of another format, or is half of zeros."""
    found = next((name for magic, name in FORMATS.items() if line.startswith(magic)), None)
    if found is None and 3 * line.count(0) > len(line):  # "a" is 61 00 or 00 61
        found = "UTF-16"
    if found is not None:
        remedy = {"UTF-16": "convert the file", "gzip": "its name must end in .gz, and be zipped once"}
        raise UserError(f"{path}, line 1: looks like {found}, not like UTF-8 text; {remedy.get(found, 'unpack it')}")


def first_line(error: Exception) -> str:
    """What an exception of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
