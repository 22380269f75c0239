"""Reads the user's parallel corpus: the demo, plain text, tables, datasets of the hub. Training instead reads the
prepared corpus (`prepared_corpus.py`).

`splits` returns the sources of each split of a configuration. A source is read pair by pair, or in chunks that worker
processes decode.
"""

import glob
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmt.config.errors import UserError, format_value, user_path
from nmt.config.schema import data as schema
from nmt.data import text as reading
from nmt.data.tokenizer import LONE_SURROGATES
from nmt.data.word_alignment import parse_pharaoh, words_of_line
from nmt.system.files import walk

CHUNK_PAIRS = 10_000
CHUNK_CHARACTERS = 5_000_000  # a chunk with more characters is complete; text files count bytes instead
DEMO = Path(__file__).with_name("demo.tsv.gz")  # made by scripts/make_demo_corpus.py
SAVED_DATASET = ("state.json", "dataset_dict.json")  # files that the library `datasets` writes


class Pair(NamedTuple):
    """A sentence pair."""

    source: str
    target: str
    alignment: str = ""  # in Pharaoh format; empty if there is none


class Source(ABC):
    """The sentence pairs of a file, table or dataset, read anew at each iteration."""

    name: str
    unit = "row"  # the word before the number of a pair in messages, as in "row 3"
    files: Sequence[Path] = ()  # the files whose contents determine the pairs
    tag = ""  # put with a space before each source sentence that is not blank; empty if the source has no tag
    has_alignments = False

    @abstractmethod
    def __iter__(self) -> Iterator[Pair]:
        """Read the pairs. Raises UserError that names the place of an invalid pair, such as file and line."""

    def chunks(self) -> Iterator["TextChunk | list[Pair]"]:
        """Read the pairs in chunks of at most CHUNK_PAIRS pairs. A chunk ends early at CHUNK_CHARACTERS characters."""
        chunk: list[Pair] = []
        size = 0
        for pair in self:
            chunk.append(pair)
            size += len(pair.source) + len(pair.target)
            if len(chunk) == CHUNK_PAIRS or size > CHUNK_CHARACTERS:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def count(self) -> int:
        """Count the pairs."""
        return sum(1 for _ in self)


Splits = dict[str, list[Source]]  # the sources of "train", "validation" and possibly "test"


class TextFiles(Source):
    """Parallel text files: PREFIX.<source_lang>, PREFIX.<target_lang>, perhaps PREFIX.<alignments>; each may be .gz."""

    unit = "line"

    def __init__(self, prefix: Path, config: schema.Corpus, key: str, tag: str = "") -> None:
        """Find the files; `key` is the configuration's key that names them, for messages."""
        self.files = [_text_file(prefix, language, key) for language in (config.source_lang, config.target_lang)]
        self.name, self.tag = str(self.files[0]), tag
        if isinstance(config, schema.FilesData) and config.alignments and _exists(prefix, config.alignments):
            self.files.append(_text_file(prefix, config.alignments, key))
            self.has_alignments = True

    def __iter__(self) -> Iterator[Pair]:
        return itertools.chain.from_iterable(self.chunks())

    def chunks(self) -> Iterator["TextChunk"]:
        """Read one line of each file at a time. Raises UserError if the files have different numbers of lines."""
        first, rows, size = 1, list[tuple[bytes, ...]](), 0
        for row in itertools.zip_longest(*map(reading.raw_lines, self.files)):
            if None in row:
                if rows:  # let the caller decode them first: if a file is not text, decoding raises a clearer error
                    yield self._chunk(first, rows)
                counts = [reading.count_lines(path) for path in self.files]
                other = next(number for number, count in enumerate(counts) if count != counts[0])
                raise UserError(
                    f"{self.files[0]} has {counts[0]} lines, but {self.files[other]} has {counts[other]}; line N of "
                    "both must belong to the same sentence pair"
                )
            rows.append(row)
            size += len(row[0]) + len(row[1])
            if len(rows) == CHUNK_PAIRS or size > CHUNK_CHARACTERS:
                yield self._chunk(first, rows)
                first, rows, size = first + len(rows), [], 0
        if rows:
            yield self._chunk(first, rows)

    def _chunk(self, first: int, rows: list[tuple[bytes, ...]]) -> "TextChunk":
        content = tuple(b"".join(lines) for lines in zip(*rows, strict=True))
        return TextChunk(tuple(self.files), first, len(rows), content, self.tag)

    def count(self) -> int:
        """Count the source lines without decoding them."""
        return reading.count_lines(self.files[0])


@dataclass(frozen=True)
class TextChunk:
    """Consecutive lines of parallel text files, not yet decoded."""

    paths: tuple[Path, ...]  # files of the sources, targets and possibly word alignments
    first: int  # number of the chunk's first line in each file, from 1
    count: int  # number of lines from each file
    content: tuple[bytes, ...]  # for each file: its lines, joined, with line ends
    tag: str  # as `Source.tag`

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Pair]:
        """Decode the pairs. Raises UserError that names file and line."""
        source, target, *alignments = (
            reading.decode_corpus_lines(path, self.first, content)
            for path, content in zip(self.paths, self.content, strict=True)
        )
        source = [_tagged(self.tag, line) for line in source]
        pairs = itertools.starmap(Pair, zip(source, target, strict=True))
        if not alignments:
            return pairs
        lines = enumerate(zip(pairs, alignments[0], strict=True), self.first)
        return (_with_alignment(pair, links, f"{self.paths[2]}, line {number}") for number, (pair, links) in lines)


class Table(Source):
    """A table file with a column per language, or a dataset saved to a folder."""

    def __init__(
        self, path: Path, columns: tuple[str, ...], header: bool = True, tag: str = "", pairs_only: bool = False
    ) -> None:
        """columns: names of the columns of source, target and possibly word alignment; header: as in `read_table`;
        pairs_only: refuse rows with further columns."""
        self.path, self.name, self.columns, self.header, self.tag = path, str(path), columns, header, tag
        self.pairs_only = pairs_only
        self.has_alignments = len(columns) > 2  # noqa: PLR2004
        self.files = _files_below(path) if path.is_dir() else [path]

    def __iter__(self) -> Iterator[Pair]:
        rows = reading.read_table(self.path, self.columns, self.header)
        pairs = _pairs(map(_checked, rows) if self.pairs_only else rows, self.columns)
        return (pair._replace(source=_tagged(self.tag, pair.source)) for pair in pairs)


class DemoPairs(Table):
    """A split of the built-in corpus: `size` rows, after `skipped` rows of other splits."""

    def __init__(self, skipped: int, size: int) -> None:
        super().__init__(DEMO, ("en", "fr", "alignment"))
        self.skipped, self.size, self.name = skipped, size, "demo"

    def __iter__(self) -> Iterator[Pair]:
        return itertools.islice(super().__iter__(), self.skipped, self.skipped + self.size)


class HubSplit(Source):
    """A split of a dataset on the Hugging Face hub."""

    def __init__(self, config: schema.HubData, split: str) -> None:
        self.config, self.split, self.name = config, split, f"{config.id} ({split})"
        if (folder := Path(config.id)).is_dir():  # `datasets` prefers a folder of this name to the hub
            self.files = _files_below(folder)

    def __iter__(self) -> Iterator[Pair]:
        columns = self.config.source_column, self.config.target_column
        return _pairs(self._rows(columns), columns)

    def _rows(self, columns: tuple[str, str]) -> Iterator[reading.Row]:
        datasets, config = reading.import_datasets(), self.config
        try:
            rows = datasets.load_dataset(config.id, config.name, split=self.split, revision=config.revision)
            rows = reading.with_columns(rows, columns)
            yield from ((f"{self.name}, row {number}", row) for number, row in enumerate(rows, 1))
        except Exception as error:  # the hub's client raises many types of exception
            raise UserError(
                f"data.id={config.id}: split '{self.split}' cannot be loaded from the hub "
                f"({reading.first_line(error)}); check the name and the network, or give a local copy with "
                "data.path=FOLDER"
            ) from None


def count_pairs(sources: Iterable[Source]) -> int:
    """Count the pairs of a split. This does not decode text files, so invalid text raises no error here."""
    return sum(source.count() for source in sources)


def locate(sources: Iterable[Source], numbers: Sequence[int]) -> str:
    """Say where pairs of a split, numbered from 1, stand in the user's files, as in "corpus/train.en, lines 3, 17"."""
    places, before = [], 0  # `before` counts the pairs of earlier sources
    for source in sources:
        count = source.count()
        if inner := [str(number - before) for number in numbers if before < number <= before + count]:
            places.append(f"{source.name}, {source.unit}{'s' if len(inner) > 1 else ''} {', '.join(inner)}")
        before += count
    return "; ".join(places)


def _text_file(prefix: Path, suffix: str, key: str) -> Path:
    """Find PREFIX.SUFFIX or PREFIX.SUFFIX.gz. Raises UserError, which names the option `key`, if neither is a file."""
    plain = prefix.with_name(f"{prefix.name}.{suffix}")
    for path in (plain, plain.with_name(f"{plain.name}.gz")):
        if path.is_file():
            return path
        if path.is_dir():
            raise UserError(f"{key}: {path}: is a folder, not a text file")
    raise UserError(f"{key}: {plain}: no such file (nor {plain.name}.gz)")


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for parent, names in walk(folder) for name in names if (path := parent / name).is_file())


def _exists(prefix: Path, suffix: str) -> bool:
    return any(Path(f"{prefix}.{suffix}{end}").is_file() for end in ("", ".gz"))


def _tagged(tag: str, source: str) -> str:
    """Put the tag, if there is one, before a source sentence, unless the sentence is blank."""
    return f"{tag} {source}" if tag and not reading.is_blank(source) else source


def _pairs(rows: Iterable[reading.Row], columns: tuple[str, ...]) -> Iterator[Pair]:
    """Read pairs from rows. `columns` names the columns of source, target and possibly word alignment."""
    for location, row in rows:
        source, target, *links = (_cell(row, column, location) for column in columns)
        pair = Pair(source, target)
        yield _with_alignment(pair, links[0], location) if links else pair


def _checked(row: reading.Row) -> reading.Row:
    """Raise UserError unless a row has two columns: without a header, nothing says which of more are meant."""
    location, cells = row
    if len(cells) != 2:  # noqa: PLR2004
        raise UserError(
            f"{location}: has {len(cells)} columns; which are the source and the target? Set data.source_column=1 "
            "data.target_column=2, for example"
        )
    return row


def _cell(row: dict[str, Any], column: str, location: str) -> str:
    """Return the text of a column. If none is named `column`, dots in `column` separate the names of nested columns."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"{location}: no column '{column}' (there are: {format_value(', '.join(map(str, row)))}); set "
                "data.source_column, data.target_column or data.alignments (a.b is column b within a)"
                f"{'' if '1' in row else f', or {reading.NO_HEADER}'}"
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
    """Add a word alignment to a pair. Raises UserError if it is malformed or links words that do not exist."""
    try:
        _, possible = parse_pharaoh(links)
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None
    lengths = len(words_of_line(pair.source)), len(words_of_line(pair.target))
    for source, target in sorted(possible):
        if source >= lengths[0] or target >= lengths[1]:
            raise UserError(
                f"{location}: link {source}-{target} is out of range: the source has {lengths[0]} words, the "
                f"target {lengths[1]} (separated by spaces, numbered from 0)"
            )
    return pair._replace(alignment=links)


# The splits of a configured corpus


def splits(config: schema.Data) -> Splits:
    """Return the sources of each split. Raises UserError for files that do not exist."""
    result = _splits(config)
    if config.extra:
        assert isinstance(config, schema.Corpus)
        result["train"] += _sources(config.extra, config, "data.extra")
    if isinstance(config, schema.FilesData):
        _refuse_table_options(config, result)
    return result


def _splits(config: schema.Data) -> Splits:
    """Return the sources of each split, without data.extra."""
    if isinstance(config, schema.DemoData):
        test, validation = config.test_size, config.validation_size
        return {
            "train": [DemoPairs(test + validation, config.train_size)],
            "validation": [DemoPairs(test, validation)],
            "test": [DemoPairs(0, test)],
        }
    if isinstance(config, schema.MultilingualData):
        result: Splits = {}
        for corpus, files in zip(config.corpora, config.files(), strict=True):
            for split, sources in _file_splits(files, corpus.tag).items():
                result.setdefault(split, []).extend(sources)
        return result
    if isinstance(config, schema.FilesData):
        result = _file_splits(config)
        if config.alignments is not None:
            _check_alignments(config.alignments, result)
        return result
    if config.path is None:
        return {split: [HubSplit(config, name)] for split, name in config.splits if name}
    folder = user_path(config.path)
    if not folder.is_dir():
        raise UserError(f"data.path={config.path}: no such folder")
    return {split: [TextFiles(folder / name, config, "data.path")] for split, name in config.path_splits if name}


def _refuse_table_options(config: schema.FilesData, result: Splits) -> None:
    """Raise UserError for options of tables if none of the files is a table."""
    columns = {"source_column": config.source_column, "target_column": config.target_column}
    given = [f"data.{key}={value}" for key, value in columns.items() if value is not None]
    given += [] if config.header else ["data.header=false"]
    if given and not any(isinstance(source, Table) for sources in result.values() for source in sources):
        raise UserError(
            f"{given[0]}: is for tables (.tsv .csv .jsonl .parquet), but all files are plain text; leave it out"
        )


def _check_alignments(suffix: str, result: Splits) -> None:
    """Raise UserError if no split has word alignments, or if only some sources of a held-out split have them: the
    alignment error rate would then count all links in the other sources as wrong."""
    for split, sources in result.items():
        without = [source for source in sources if not source.has_alignments]
        if split != "train" and without and len(without) < len(sources):
            raise UserError(
                f"data.alignments={suffix}: {without[0].name} of data.{split} has no such file, but others of the "
                "split have; add it, or leave out data.alignments"
            )
    if not any(source.has_alignments for sources in result.values() for source in sources):
        raise UserError(f"data.alignments={suffix}: no split has such a file; expected a name like PREFIX.{suffix}")


def _file_splits(config: schema.FilesData, tag: str = "") -> Splits:
    names = {"train": config.train, "validation": config.validation, "test": config.test}
    return {split: _sources(paths, config, f"data.{split}", tag) for split, paths in names.items() if paths}


def _sources(names: list[str], config: schema.Corpus, key: str, tag: str = "") -> list[Source]:
    return [_source(path, config, key, tag) for name in names for path in _matches(name, config, key)]


def _matches(name: str, config: schema.Corpus, key: str) -> list[str]:
    """List in sorted order the tables and prefixes of plain text that match the pattern `name`. If `name` has no
    wildcards, or is itself an existing path or prefix, return it alone. Raises UserError if nothing matches."""
    path = str(user_path(name))
    if not glob.has_magic(path) or Path(path).exists() or _exists(Path(path), config.source_lang):
        return [name]
    result = {match for match in glob.glob(path) if Path(match).is_dir() or reading.table_format(Path(match))}
    for suffix in (f".{config.source_lang}", f".{config.source_lang}.gz"):
        result |= {match.removesuffix(suffix) for match in glob.glob(f"{path}{suffix}")}
    if not result:
        raise UserError(
            f"{key}={name}: matches neither a table (.tsv .csv .jsonl .parquet) nor, as a prefix of plain text, a file "
            f"{Path(name).name}.{config.source_lang}"
        )
    return sorted(result)


def _source(name: str, config: schema.Corpus, key: str, tag: str) -> Source:
    """Open a table, a saved dataset or a prefix of plain text. `key` names the option in messages."""
    path = user_path(name)
    if path.is_dir() and not any((path / marker).is_file() for marker in SAVED_DATASET):
        raise UserError(
            f"{key}={name}: is a folder, but not a saved dataset; for plain text give the prefix of its files, such as "
            f"{key}={name}/PREFIX for {name}/PREFIX.{config.source_lang}"
        )
    is_table = path.is_dir() or reading.table_format(path) is not None
    if path.exists() and is_table:
        if not isinstance(config, schema.FilesData):
            return Table(path, (config.source_lang, config.target_lang))
        alignments = [config.alignments] if config.alignments and key != "data.extra" else []
        return Table(path, (*config.columns, *alignments), config.header, tag, config.has_pairs_only)
    if is_table and not _exists(path, config.source_lang):
        raise UserError(f"{key}={name}: no such table")
    if path.is_file():
        raise UserError(
            f"{key}={name}: neither a table (.tsv .csv .jsonl .parquet) nor a prefix; for plain text give the path "
            f"without the language: PREFIX, so that PREFIX.{config.source_lang} is the source"
        )
    return TextFiles(path, config, key, tag)
