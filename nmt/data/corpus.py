"""Reading parallel text as the user keeps it: the demo, plain text, tables, the hub. Only preparation needs this."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.paths import user_path
from nmt.data.demo import corpus as demo
from nmt.data.reading import (
    Row,
    first_line,
    hub_answers,
    hugging_face_datasets,
    read_lines,
    read_some_lines,
    read_table,
    table_format,
)
from nmt.metrics.alignment import parse_pharaoh, words_of_line

LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # as an escape in JSON can spell it


class Pair(NamedTuple):
    """A sentence pair; None stands for a side that was not valid UTF-8 and is to be dropped."""

    source: str | None
    target: str | None
    alignment: str = ""  # word alignment in Pharaoh format, where there is one


Splits = dict[str, Iterable[Pair]]  # train, validation and possibly test


def splits(config: schema.Data) -> Splits:
    """The splits of a corpus, read lazily and as often as iterated over. Raises UserError naming file and line."""
    found = _splits(config)
    if config.extra:
        found["train"] = Several([found["train"], *(_file_split(name, config, "data.extra") for name in config.extra)])
    return found


def _splits(config: schema.Data) -> Splits:
    if isinstance(config, schema.DemoData):
        made = demo.generate(config.train_size, config.validation_size, config.test_size, config.seed)
        return {name: [Pair(*row) for row in getattr(made, name)] for name in made._fields}
    if isinstance(config, schema.FilesData):
        names = {"train": config.train, "validation": config.validation, "test": config.test}
        found = {split: _file_split(name, config, f"data.{split}") for split, name in names.items() if name}
        texts = [split for split in found.values() if isinstance(split, Text)]
        if config.alignments is not None and texts and not any(text.alignments for text in texts):
            raise UserError(
                f"data.alignments={config.alignments}: no split has such a file (looked for {config.train}."
                f"{config.alignments} and its like)"
            )
        return {**found}
    if config.path is None:
        return {split: Hub(config, name) for split, name in config.splits if name}
    folder = user_path(config.path)
    if not folder.is_dir():
        raise UserError(f"data.path={config.path}: no such folder")
    return {split: Text(folder / name, config) for split, name in config.path_splits if name}


def files(config: schema.Data) -> list[Path]:
    """The files that a corpus is made of, for its fingerprint; none for the demo and the hub. Raises UserError."""
    read = splits(config).values() if config.kind != "demo" or config.extra else []
    return [path for pairs in read if isinstance(pairs, Text | Table | Several) for path in pairs.paths]


def place(pairs: Iterable[Pair], numbers: Sequence[int]) -> str:
    """Where pairs of a split stand, counted from 1, in words: "corpus/train.en, lines 3, 17"."""
    if isinstance(pairs, Several):
        return "; ".join(place(part, inner) for part, inner in pairs.find(numbers))
    name, unit = (pairs.name, pairs.unit) if isinstance(pairs, Text | Table | Hub) else ("demo", "pair")
    return f"{name}, {unit}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class Text:
    """Two files of plain text, PREFIX.<source_lang> and PREFIX.<target_lang>, possibly .gz, and where there is
    one a third with their word alignments, PREFIX.<alignments>.

    Lines end at "\\n" alone: splitting at carriage returns or U+2028 too, as ready-made readers do, would shift one
    side against the other.
    """

    unit = "line"

    def __init__(self, prefix: Path, config: schema.Corpus) -> None:
        for key in ("source_lang", "target_lang", "alignments"):
            suffix = getattr(config, key, None)
            if suffix and "/" in suffix:
                raise UserError(
                    f"data.{key}={suffix}: is a path; give what follows '{prefix}.' in the name of the file, such as "
                    f"data.{key}={suffix.rpartition('/')[2].rpartition('.')[2] or 'en'}"
                )
        self.paths = [_existing(prefix, lang) for lang in (config.source_lang, config.target_lang)]
        self.name = str(self.paths[0])
        self.drop = config.invalid_utf8 == "drop"
        self.alignments = None
        if isinstance(config, schema.FilesData) and config.alignments is not None:
            with contextlib.suppress(UserError):
                self.alignments = _existing(prefix, config.alignments)
                self.paths.append(self.alignments)

    def __iter__(self) -> Iterator[Pair]:
        if self.alignments is None:
            yield from self._pairs()
            return
        missing = object()
        lines = itertools.zip_longest(self._pairs(), read_lines(self.alignments), fillvalue=missing)
        for number, (pair, links) in enumerate(lines, 1):
            if pair is missing or links is missing:
                raise UserError(
                    f"{self.alignments}: has {'more' if pair is missing else 'fewer'} lines than {self.paths[0]}; "
                    "line N must be the word alignment of pair N"
                )
            yield _aligned(cast(Pair, pair), cast(str, links), f"{self.alignments}, line {number}")

    def _pairs(self) -> Iterator[Pair]:
        source, target, *_ = self.paths
        missing = object()
        sides = read_some_lines(source, self.drop), read_some_lines(target, self.drop)
        pairs = itertools.zip_longest(*sides, fillvalue=missing)
        for count, (left, right) in enumerate(pairs):
            if left is missing or right is missing:
                longer = count + 1 + sum(1 for _ in pairs)
                counts = (count, longer) if left is missing else (longer, count)
                raise UserError(
                    f"{source} has {counts[0]} lines, but {target} has {counts[1]}; line N of one side must be the "
                    "translation of line N of the other"
                )
            yield Pair(cast(str | None, left), cast(str | None, right))


class Table:
    """One file with a column for each language, or a dataset saved to a folder."""

    unit = "row"  # without the header

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        """columns: of source, target and possibly word alignments."""
        self.path, self.name, self.columns = path, str(path), columns
        self.paths = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def __iter__(self) -> Iterator[Pair]:
        return _pairs(read_table(self.path), self.columns)


class Hub:
    """One split of a dataset of the Hugging Face hub."""

    unit = "row"

    def __init__(self, config: schema.HubData, split: str) -> None:
        self.config, self.split, self.name = config, split, f"{config.id} ({split})"

    def __iter__(self) -> Iterator[Pair]:
        return _pairs(self._rows(), (self.config.source_column, self.config.target_column))

    def _rows(self) -> Iterator[Row]:
        datasets = hugging_face_datasets()
        config = self.config
        if not hub_answers(config.id):
            datasets.config.HF_HUB_OFFLINE = True  # what was loaded before is still there
        try:
            loaded = datasets.load_dataset(config.id, config.name, split=self.split, revision=config.revision)
        except Exception as error:  # the hub's client raises many kinds; all mean that the corpus is not to be had
            raise UserError(
                f"data.id={config.id}: split '{self.split}' cannot be loaded from the hub ({first_line(error)}); "
                "check the name and the network, or give a local copy with data.path=FOLDER"
            ) from None
        for number, row in enumerate(cast(Iterable[dict[str, Any]], loaded), 1):
            yield f"{self.name}, row {number}", row


class Several:
    """Pairs of several places, one after the other."""

    def __init__(self, parts: Sequence[Iterable[Pair]]) -> None:
        self.parts = parts
        self.paths = [path for part in parts if isinstance(part, Text | Table) for path in part.paths]

    def __iter__(self) -> Iterator[Pair]:
        return itertools.chain.from_iterable(self.parts)

    def find(self, numbers: Sequence[int]) -> Iterator[tuple[Iterable[Pair], list[int]]]:
        """Pairs by their numbers, from 1 -> the parts that they stand in, and their numbers there."""
        before = 0
        for part in self.parts:
            count = sum(1 for _ in part)
            if inner := [number - before for number in numbers if before < number <= before + count]:
                yield part, inner
            before += count


def _file_split(name: str, config: schema.Data, key: str) -> Text | Table:
    path = user_path(name)
    if path.is_dir() and not any((path / of_dataset).is_file() for of_dataset in ("state.json", "dataset_dict.json")):
        found = min(path.glob(f"*.{config.source_lang}"), default=path / f"PREFIX.{config.source_lang}")
        raise UserError(
            f"{key}={name}: is a folder, and not a saved dataset; for plain text give the prefix of its files, such as "
            f"{key}={found.with_suffix('')}"
        )
    if path.is_dir() or (path.is_file() and table_format(path)):
        if not isinstance(config, schema.FilesData):
            return Table(path, (config.source_lang, config.target_lang))
        columns = [config.source_column or config.source_lang, config.target_column or config.target_lang]
        links = [config.alignments] if config.alignments and key != "data.extra" else []
        return Table(path, (*columns, *links))
    if path.is_file():
        prefix = plain = name.removesuffix(".gz")
        for language in (config.source_lang, config.target_lang):
            prefix = prefix.removesuffix(f".{language}")
        shown = f"{key}={prefix}" if prefix != plain else f"PREFIX, so that PREFIX.{config.source_lang} is the source"
        raise UserError(
            f"{key}={name}: neither a table (.tsv .csv .jsonl .parquet) nor a prefix; for plain text give the path "
            f"without the language: {shown}"
        )
    return Text(path, config)


def _pairs(rows: Iterable[Row], columns: tuple[str, ...]) -> Iterator[Pair]:
    """Rows of a table -> pairs; a dot in a column's name reaches into a nested column."""
    for place, row in rows:
        source, target, *links = (_cell(row, column, place) for column in columns)
        yield _aligned(Pair(source, target), links[0], place) if links else Pair(source, target)


def _cell(row: dict[str, Any], column: str, place: str) -> str:
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"{place}: no column '{column}' (there are: {', '.join(map(str, row))}); "
                "set data.source_column, data.target_column (or data.alignments)"
            )
        value = value[part]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place}: column '{column}' holds {type(value).__name__}, not text")
    if not value.isascii() and LONE_SURROGATE.search(value):
        raise UserError(f"{place}: column '{column}' holds half of a surrogate pair, which is no character")
    return value.replace("\n", " ")


def _aligned(pair: Pair, links: str, place: str) -> Pair:
    """The pair with its word alignment. Raises UserError if that is none, or of other sentences."""
    try:
        _, possible = parse_pharaoh(links)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    if pair.source is not None and pair.target is not None:
        lengths = len(words_of_line(pair.source)), len(words_of_line(pair.target))
        for link in sorted(possible):
            if link[0] >= lengths[0] or link[1] >= lengths[1]:
                raise UserError(
                    f"{place}: link {link[0]}-{link[1]}, but the pair has {lengths[0]} and {lengths[1]} words "
                    "(counted from 0, separated by spaces)"
                )
    return pair._replace(alignment=links)


def _existing(prefix: Path, lang: str) -> Path:
    plain = prefix.with_name(f"{prefix.name}.{lang}")
    for path in (plain, plain.with_name(f"{plain.name}.gz")):
        if path.is_file():
            return path
        if path.is_dir():
            raise UserError(f"{path}: is a folder, not a file of text")
    raise UserError(f"{plain}: no such file (nor {plain.name}.gz)")
