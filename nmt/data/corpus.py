"""The user's parallel corpus: the demo, plain text, tables, the Hugging Face hub. Only preparation needs this."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data import reading
from nmt.data.demo import corpus as demo
from nmt.data.tokenizer import LONE_SURROGATES
from nmt.metrics.alignment import parse_pharaoh, words_of_line


class Pair(NamedTuple):
    """A sentence pair. A side is None if it is not valid UTF-8 and the pair is to be dropped."""

    source: str | None
    target: str | None
    alignment: str = ""  # Pharaoh format, if there is one


Splits = dict[str, Iterable[Pair]]  # train, validation and possibly test


def splits(config: schema.Data) -> Splits:
    """The splits of a corpus, read at each iteration. Raises UserError that names file and line."""
    result = _splits(config)
    if config.extra:
        extra = [_file_split(name, config, "data.extra") for name in config.extra]
        result["train"] = Concatenation([result["train"], *extra])
    return result


def _splits(config: schema.Data) -> Splits:
    if isinstance(config, schema.DemoData):
        triples = demo.generate(config.train_size, config.validation_size, config.test_size, config.seed)
        return {name: [Pair(*triple) for triple in split] for name, split in triples._asdict().items()}
    if isinstance(config, schema.FilesData):
        names = {"train": config.train, "validation": config.validation, "test": config.test}
        result = {split: _file_split(name, config, f"data.{split}") for split, name in names.items() if name}
        texts = [split for split in result.values() if isinstance(split, TextFiles)]
        if config.alignments is not None and texts and not any(text.alignments for text in texts):
            raise UserError(
                f"data.alignments={config.alignments}: no split has such a file; expected a name like {config.train}."
                f"{config.alignments}"
            )
        return {**result}
    if config.path is None:
        return {split: HubSplit(config, name) for split, name in config.splits if name}
    folder = user_path(config.path)
    if not folder.is_dir():
        raise UserError(f"data.path={config.path}: no such folder")
    return {split: TextFiles(folder / name, config) for split, name in config.path_splits if name}


def _file_split(name: str, config: schema.Data, key: str) -> "TextFiles | Table":
    path = user_path(name)
    if path.is_dir() and not any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        text = min(path.glob(f"*.{config.source_lang}"), default=path / f"PREFIX.{config.source_lang}")
        raise UserError(
            f"{key}={name}: is a folder, but not a saved dataset; for plain text give the prefix of its files, such as "
            f"{key}={text.with_suffix('')}"
        )
    if path.is_dir() or (path.is_file() and reading.table_format(path)):
        if not isinstance(config, schema.FilesData):
            return Table(path, (config.source_lang, config.target_lang))
        columns = [config.source_column or config.source_lang, config.target_column or config.target_lang]
        alignments = [config.alignments] if config.alignments and key != "data.extra" else []
        return Table(path, (*columns, *alignments))
    if path.is_file():
        prefix = plain = name.removesuffix(".gz")
        for language in (config.source_lang, config.target_lang):
            prefix = prefix.removesuffix(f".{language}")
        example = f"{key}={prefix}" if prefix != plain else f"PREFIX, so that PREFIX.{config.source_lang} is the source"
        raise UserError(
            f"{key}={name}: neither a table (.tsv .csv .jsonl .parquet) nor a prefix; for plain text give the path "
            f"without the language: {example}"
        )
    return TextFiles(path, config)


def files(config: schema.Data) -> list[Path]:
    """The corpus files, for the fingerprint; none for the demo and the hub. Raises UserError."""
    read = splits(config).values() if config.kind != "demo" or config.extra else []
    return [path for pairs in read if isinstance(pairs, TextFiles | Table | Concatenation) for path in pairs.paths]


def locate(pairs: Iterable[Pair], numbers: Sequence[int]) -> str:
    """The location of pairs of a split, numbered from 1: "corpus/train.en, lines 3, 17"."""
    if isinstance(pairs, Concatenation):
        return "; ".join(locate(part, inner) for part, inner in pairs.find(numbers))
    name, unit = (pairs.name, pairs.unit) if isinstance(pairs, TextFiles | Table | HubSplit) else ("demo", "pair")
    return f"{name}, {unit}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class TextFiles:
    """Plain text: PREFIX.<source_lang>, PREFIX.<target_lang> and optionally PREFIX.<alignments>, each possibly .gz."""

    unit = "line"

    def __init__(self, prefix: Path, config: schema.Corpus) -> None:
        for key in ("source_lang", "target_lang", "alignments"):
            suffix = getattr(config, key, None)
            if suffix and "/" in suffix:
                raise UserError(
                    f"data.{key}={suffix}: is a path; give what follows '{prefix}.' in the file's name, such as "
                    f"data.{key}={suffix.rpartition('/')[2].rpartition('.')[2] or 'en'}"
                )
        self.paths = [_text_file(prefix, lang) for lang in (config.source_lang, config.target_lang)]
        self.name = str(self.paths[0])
        self.drop_invalid = config.invalid_utf8 == "drop"
        self.alignments = None
        if isinstance(config, schema.FilesData) and config.alignments is not None:
            with contextlib.suppress(UserError):
                self.alignments = _text_file(prefix, config.alignments)
                self.paths.append(self.alignments)

    def __iter__(self) -> Iterator[Pair]:
        if self.alignments is None:
            yield from self._pairs()
            return
        missing = object()
        rows = itertools.zip_longest(self._pairs(), reading.read_lines(self.alignments), fillvalue=missing)
        for number, (pair, links) in enumerate(rows, 1):
            if pair is missing or links is missing:
                raise UserError(
                    f"{self.alignments}: has {'more' if pair is missing else 'fewer'} lines than {self.paths[0]}; "
                    "line N must be the word alignment of pair N"
                )
            yield _with_alignment(cast(Pair, pair), cast(str, links), f"{self.alignments}, line {number}")

    def _pairs(self) -> Iterator[Pair]:
        source, target, *_ = self.paths
        missing = object()
        sides = reading.read_valid_lines(source, self.drop_invalid), reading.read_valid_lines(target, self.drop_invalid)
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


def _text_file(prefix: Path, suffix: str) -> Path:
    plain = prefix.with_name(f"{prefix.name}.{suffix}")
    for path in (plain, plain.with_name(f"{plain.name}.gz")):
        if path.is_file():
            return path
        if path.is_dir():
            raise UserError(f"{path}: is a folder, not a text file")
    raise UserError(f"{plain}: no such file (nor {plain.name}.gz)")


class Table:
    """A table file with a column per language, or a dataset saved to a folder."""

    unit = "row"  # without the header

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        """columns: of sources, targets and possibly word alignments."""
        self.path, self.name, self.columns = path, str(path), columns
        self.paths = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def __iter__(self) -> Iterator[Pair]:
        return _pairs(reading.read_table(self.path), self.columns)


class HubSplit:
    """A split of a dataset on the Hugging Face hub."""

    unit = "row"

    def __init__(self, config: schema.HubData, split: str) -> None:
        self.config, self.split, self.name = config, split, f"{config.id} ({split})"

    def __iter__(self) -> Iterator[Pair]:
        return _pairs(self._rows(), (self.config.source_column, self.config.target_column))

    def _rows(self) -> Iterator[reading.Row]:
        datasets = reading.import_datasets()
        config = self.config
        if not reading.hub_answers(config.id):
            datasets.config.HF_HUB_OFFLINE = True  # reads what was downloaded before
        try:
            rows = datasets.load_dataset(config.id, config.name, split=self.split, revision=config.revision)
        except Exception as error:  # the hub's client raises many types
            raise UserError(
                f"data.id={config.id}: split '{self.split}' cannot be loaded from the hub "
                f"({reading.first_line(error)}); check the name and the network, or give a local copy with "
                "data.path=FOLDER"
            ) from None
        yield from ((f"{self.name}, row {number}", row) for number, row in enumerate(rows, 1))


class Concatenation:
    """Several sources of pairs, one after the other."""

    def __init__(self, parts: Sequence[Iterable[Pair]]) -> None:
        self.parts = parts
        self.paths = [path for part in parts if isinstance(part, TextFiles | Table) for path in part.paths]

    def __iter__(self) -> Iterator[Pair]:
        return itertools.chain.from_iterable(self.parts)

    def find(self, numbers: Sequence[int]) -> Iterator[tuple[Iterable[Pair], list[int]]]:
        """Numbers of pairs, from 1 -> the parts that contain them, each with the numbers within the part."""
        start = 0
        for part in self.parts:
            count = sum(1 for _ in part)
            if inner := [number - start for number in numbers if start < number <= start + count]:
                yield part, inner
            start += count


def _pairs(rows: Iterable[reading.Row], columns: tuple[str, ...]) -> Iterator[Pair]:
    """Table rows -> pairs."""
    for location, row in rows:
        source, target, *links = (_cell(row, column, location) for column in columns)
        pair = Pair(source, target)
        yield _with_alignment(pair, links[0], location) if links else pair


def _cell(row: dict[str, Any], column: str, location: str) -> str:
    """The text of a column; a dot in its name separates the names of nested columns."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"{location}: no column '{column}' (there are: {', '.join(map(str, row))}); "
                "set data.source_column, data.target_column (or data.alignments)"
            )
        value = value[part]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{location}: column '{column}' holds {type(value).__name__}, not text")
    if not value.isascii() and LONE_SURROGATES.search(value):
        raise UserError(f"{location}: column '{column}' holds half of a surrogate pair, which is not a character")
    return value.replace("\n", " ")


def _with_alignment(pair: Pair, links: str, location: str) -> Pair:
    """The pair with its word alignment. Raises UserError if it is malformed or links words that do not exist."""
    try:
        _, possible = parse_pharaoh(links)
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None
    if pair.source is not None and pair.target is not None:
        lengths = len(words_of_line(pair.source)), len(words_of_line(pair.target))
        for source, target in sorted(possible):
            if source >= lengths[0] or target >= lengths[1]:
                raise UserError(
                    f"{location}: link {source}-{target} is out of range: the source has {lengths[0]} words, the "
                    f"target {lengths[1]} (separated by spaces, numbered from 0)"
                )
    return pair._replace(alignment=links)
