"""Reads lines and table rows of the user's files. Errors name the file and the line."""

import csv
import glob
import gzip
import itertools
import json
import logging
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast
from unicodedata import category

from nmt.config.errors import UserError

BOM = b"\xef\xbb\xbf"
LINES = 1000  # lines that are decoded at a time
OTHER_FORMATS = {  # names of formats other than text, by the first bytes of a file
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"PK\x03\x04": "zip",
}  # fmt: skip
TABLES = {".tsv": "tsv", ".csv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
NO_HEADER = "data.header=false (columns are then numbered from 1: data.source_column=1 data.target_column=2)"

INVISIBLE = {"Cc", "Cf", "Zl", "Zp", "Zs"}  # Unicode categories of characters that show nothing
# Characters of other categories that show nothing: joiners, fillers, the empty Braille cell, variation selectors.
SELECTORS = *range(0xFE00, 0xFE10), *range(0x180B, 0x1810), *range(0xE0100, 0xE01F0)
FILLERS = {*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0", *map(chr, SELECTORS)}

Row = tuple[str, dict[str, Any]]  # location such as "corpus.tsv, line 3"; column name -> cell
csv.field_size_limit(sys.maxsize)  # sentences may be long
log = logging.getLogger(__name__)


def read_corpus_lines(path: Path) -> Iterator[str]:
    """Read the lines of a text file, plain or .gz, without line ends. Raises UserError if the file cannot be read, is
    empty, or is not valid UTF-8."""
    lines, first = raw_lines(path), 1
    while block := list(islice(lines, LINES)):
        yield from decode_corpus_lines(path, first, b"".join(block))
        first += len(block)


def raw_lines(path: Path) -> Iterator[bytes]:
    """Read the lines of a text file, plain or .gz, as bytes with their line ends. Only LF ends a line. Raises UserError
    if the file cannot be read or is empty."""
    number = 0
    try:
        with open_text(path) as file:
            for raw in file:
                number += 1
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}, after line {number}: cannot be read ({first_line(error)})") from None
    if number == 0:
        raise UserError(f"{path}: is empty")


def count_lines(path: Path) -> int:
    """Count the lines of a text file, plain or .gz. Raises UserError if it cannot be read or is empty."""
    return sum(1 for _ in raw_lines(path))


def open_text(path: Path) -> BinaryIO:
    """Open a text file, plain or .gz, for reading. Raises OSError."""
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))


def user_lines(name: str, lines: Iterable[bytes], strict: bool = True) -> Iterator[str]:
    """Decode the lines of a file that the user names, and remove line ends and byte order mark.

    Raises UserError, with a message that starts with `name`, if the file cannot be read, is not text, or is not UTF-8.
    With strict=False, bytes that are not UTF-8 become U+FFFD, with a warning.
    """
    number = 0
    try:
        for number, raw in enumerate(lines, 1):
            line = raw.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                _check_is_text(name, line)
                line = line.removeprefix(BOM)
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                if strict:
                    raise _not_utf8(name, number, error.start) from None
                log.warning("%s, line %d: not valid UTF-8, the invalid bytes are read as U+FFFD", name, number)
                yield line.decode("utf-8", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}, after line {number}: cannot be read ({first_line(error)})") from None


def _not_utf8(name: str | Path, number: int, offset: int) -> UserError:
    return UserError(f"{name}, line {number}: not valid UTF-8 (byte {offset + 1} of the line); convert the file")


def is_blank(text: str) -> bool:
    """Check whether a text has only spaces, control characters, formatting characters and fillers, or is empty."""
    return all(category(char) in INVISIBLE or char in FILLERS for char in text)


def decode_corpus_lines(path: Path, first: int, content: bytes) -> list[str]:
    """Decode consecutive lines of a file, and remove line ends. `first` is the number of the first line, from 1. Raises
    UserError for a line that is not UTF-8."""
    if first == 1:
        _check_is_text(path, content.partition(b"\n")[0].removesuffix(b"\r"))
        content = content.removeprefix(BOM)
    try:
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        offset = error.start - (before.rfind(b"\n") + 1)
        raise _not_utf8(path, first + before.count(b"\n"), offset) from None
    return [line.removesuffix("\r") for line in lines] if b"\r" in content else lines


def _check_is_text(path: Path | str, line: bytes) -> None:
    """Raise UserError if the first line looks like another format than UTF-8 text."""
    name = next((name for magic, name in OTHER_FORMATS.items() if line.startswith(magic)), None)
    # UTF-16 without a byte order mark has a NUL in each ASCII character. A line of NULs alone is blank text.
    if name is None and 3 * line.count(0) > len(line) > line.count(0):
        name = "UTF-16"
    if name is not None:
        remedy = "convert the file" if name == "UTF-16" else "unpack it"
        raise UserError(f"{path}, line 1: looks like {name}, not UTF-8 text; {remedy}")


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, or the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def table_format(path: Path) -> str | None:
    """Return the format of a table by its file name's suffix; a final .gz is ignored. None if it is no table."""
    suffixes = path.suffixes[:-1] if path.suffix == ".gz" else path.suffixes
    return TABLES.get(suffixes[-1]) if suffixes else None


def read_table(path: Path, columns: Sequence[str], header: bool = True) -> Iterator[Row]:
    """Read the rows of a table, or of a dataset saved to a folder, with at least these columns if it has them.

    With `header`, the first row of a .tsv or .csv names the columns; otherwise they are named "1", "2", ... Raises
    UserError that names the broken line.
    """
    kind = "folder" if path.is_dir() else table_format(path)
    if not header and kind not in {"tsv", "csv"}:
        raise UserError(f"data.header=false: {path} names its columns itself; the option is for .tsv and .csv")
    match kind:
        case "json":
            return _json_rows(path)
        case "tsv":  # has no quoting: a " is an ordinary character
            lines = enumerate(read_corpus_lines(path), 1)
            return _named(path, ((number, line.split("\t")) for number, line in lines if line), header)
        case "csv":
            return _named(path, _csv_rows(path), header)
        case _:
            return _dataset_rows(path, columns)


def _named(path: Path, rows: Iterator[tuple[int, list[str]]], has_header: bool) -> Iterator[Row]:
    """Convert numbered rows of cells to rows with a location and named columns."""
    first = next(rows, (0, list[str]()))
    header = first[1] if has_header else [str(number) for number in range(1, 1 + len(first[1]))]
    if any("\r" in name for name in first[1]):
        raise UserError(f"{path}, line {first[0]}: has carriage returns within; convert the line ends to \\n")
    if len(header) == 1:
        separator = "commas" if table_format(path) == "csv" else "tabs"
        raise UserError(f"{path}, line {first[0]}: has one column, but cells are separated by {separator}")
    if len(set(header)) < len(header):
        raise UserError(
            f"{path}, line {first[0]}: two columns have the same name; rename one, or if this row is a sentence pair, "
            f"set {NO_HEADER}"
        )
    for number, cells in rows if has_header else itertools.chain([first], rows):
        location = f"{path}, line {number}"
        if len(cells) != len(header):
            count = f"{len(cells)} column{'s' if len(cells) > 1 else ''}"
            raise UserError(f"{location}: has {count}, but line {first[0]} has {len(header)}")
        yield location, dict(zip(header, cells, strict=True))


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    # The csv module refuses a carriage return within a cell without quotes.
    """Read the rows of a .csv file, each with the number of its first line."""
    reader = csv.reader((line.replace("\r", " ") + "\n" for line in read_corpus_lines(path)), strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1  # a quoted cell may contain line ends
    except csv.Error as error:
        raise UserError(f"{path}, line {number}: cannot be read as a table ({error})") from None


def _json_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file of JSON lines, or of a file with one JSON array of objects."""
    for number, line in enumerate(read_corpus_lines(path), 1):
        location = f"{path}, line {number}"
        if number == 1 and line.lstrip().startswith("["):
            rows = enumerate(_parse_json("\n".join(read_corpus_lines(path)), location), 1)
            yield from ((f"{path}, row {index}", _json_object(row, f"{path}, row {index}")) for index, row in rows)
            return
        if line.strip():
            yield location, _json_object(_parse_json(line, location), location)


def _parse_json(text: str, location: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{location}: cannot be read as JSON ({first_line(error)}); a file holds one object per line, or one array "
            "of objects"
        ) from None


def _json_object(row: Any, location: str) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(row, dict):
        raise UserError(f'{location}: is no JSON object such as {{"en": "a dog", "de": "ein Hund"}}')
    return row


def _dataset_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Read the rows of a Parquet file, or of a dataset saved to a folder, with the library `datasets`."""
    datasets = import_datasets()
    try:
        if path.is_dir():
            table: Any = datasets.load_from_disk(str(path))
            if isinstance(table, datasets.DatasetDict):
                raise UserError(f"{path}: holds several splits; give one of them, such as {path}/train")
        else:
            files = glob.escape(str(path))
            table = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(with_columns(table, columns), 1))
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets raise many types of exception for a broken table
        raise UserError(f"{path}: cannot be read as a table ({first_line(error)})") from None


def with_columns(table: Any, columns: Sequence[str]) -> Any:  # noqa: ANN401
    """Leave out the other columns of a dataset, so that pictures and sound are not decoded; keep all if one is missing.
    A name such as translation.en stands for a part of the column `translation`."""
    names = list(dict.fromkeys(name.partition(".")[0] for name in columns))
    return table.select_columns(names) if {*names} <= {*(table.column_names or ())} else table


def import_datasets() -> Any:  # noqa: ANN401
    """Import the library `datasets` of Hugging Face, which takes seconds, and turn off its download statistics."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets
