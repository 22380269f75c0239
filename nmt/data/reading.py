"""Reading lines and table rows from the user's files."""

import csv
import gzip
import json
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

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


TABLES = {".tsv": "tsv", ".csv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
Row = tuple[str, dict[str, Any]]

csv.field_size_limit(sys.maxsize)  # a long sentence is no fault of the file


def table_format(path: Path) -> str | None:
    """Which of TABLES a file's name means, gzipped or not."""
    suffixes = path.suffixes[:-1] if path.suffix == ".gz" else path.suffixes
    return TABLES.get(suffixes[-1]) if suffixes else None


def read_table(path: Path) -> Iterator[Row]:
    """The rows of a file, or of a dataset saved to a folder. Raises UserError with the line of what is broken."""
    kind = "folder" if path.is_dir() else table_format(path)
    if kind == "json":
        return _json(path)
    if kind == "parquet" and path.suffix == ".gz":
        raise UserError(f"{path}: Parquet is compressed within itself; unpack it (gunzip)")
    if kind in {"tsv", "csv"}:
        return _with_header(path, _tsv(path) if kind == "tsv" else _csv(path))
    return _dataset(path)


def hugging_face_datasets() -> Any:  # noqa: ANN401
    """The library, which takes seconds to import. It tells no server what is read here."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets


@cache
def hub_answers(dataset: str) -> bool:
    """Can the hub be reached? Asked once: `datasets` tries again and again, for 24 seconds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().dataset_info(dataset, timeout=10)
    except (HfHubHTTPError, HFValidationError):
        return True  # with an error, which `datasets` explains
    except Exception:  # a dozen kinds, of several HTTP clients
        return False
    return True


def _with_header(path: Path, rows: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    _, header = next(rows, (0, []))
    for name, times in Counter(header).items():
        if times > 1:
            raise UserError(f"{path}, line 1: {times} columns are named '{name}'; give each its own name")
    if table_format(path) == "tsv" and all(len(name) > 1 and name[0] == name[-1] == '"' for name in header):
        raise UserError(f"{path}, line 1: a .tsv is read without quoting; write it without quotes, or as a .csv")
    for number, cells in rows:
        place = f"{path}, line {number}"
        if len(cells) != len(header):
            raise UserError(f"{place}: has {len(cells)} columns, but the first line names {len(header)}")
        yield place, dict(zip(header, cells, strict=True))


def _tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Without quoting: a stray " is a character like any other."""
    for number, line in enumerate(read_lines(path), 1):
        if line:
            yield number, line.split("\t")


def _csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader((f"{line}\n" for line in read_lines(path)), strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1  # a quoted cell may hold line ends
    except csv.Error as error:
        raise UserError(f"{path}, line {number}: cannot be read as a table ({error})") from None


def _json(path: Path) -> Iterator[Row]:
    """An object a line, or one array of them."""
    for number, line in enumerate(read_lines(path), 1):
        if number == 1 and line.lstrip().startswith("["):
            rows = _parsed("\n".join(read_lines(path)), f"{path}, line 1")
            for index, row in enumerate(rows, 1):
                yield f"{path}, row {index}", _object(row, f"{path}, row {index}")
            return
        place = f"{path}, line {number}"
        if line.strip():
            yield place, _object(_parsed(line, place), place)


def _parsed(text: str, place: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: cannot be read as JSON ({first_line(error)})") from None


def _unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(items)
    if len(values) < len(items):
        repeated, _ = Counter(key for key, _ in items).most_common(1)[0]
        raise ValueError(f"'{repeated}' is given twice")
    return values


def _object(row: Any, place: str) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(row, dict):
        raise UserError(f'{place}: is no JSON object such as {{"en": "a dog", "de": "ein Hund"}}')
    return row


def _dataset(path: Path) -> Iterator[Row]:
    datasets = hugging_face_datasets()
    try:
        if path.is_dir():
            table: Any = datasets.load_from_disk(str(path))
            if isinstance(table, datasets.DatasetDict):
                raise UserError(f"{path}: holds several splits; give one of them, such as {path}/train")
        else:
            table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(table, 1))
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets have a dozen kinds for a table that is broken
        raise UserError(f"{path}: cannot be read as a table ({first_line(error)})") from None
