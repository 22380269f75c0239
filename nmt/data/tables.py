"""Rows of a table, each with its place in words, such as "corpus.tsv, line 3"."""

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError
from nmt.data.lines import first_line, read_lines

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
