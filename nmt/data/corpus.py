"""The user's parallel corpus: the demo, plain text, tables, datasets of the hub. Only preparation needs this.

`splits` gives the sources of pairs that a configuration names. Each is read pair by pair, or in chunks that worker
processes decode.
"""

import contextlib
import glob
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nmt.config.errors import UserError, format_value
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data import demo
from nmt.data import text as reading
from nmt.data.tokenizer import LONE_SURROGATES
from nmt.data.word_alignment import parse_pharaoh, words_of_line

CHUNK, CHARACTERS = 10_000, 5_000_000  # pairs and characters (or bytes) of a chunk


class Pair(NamedTuple):
    """A sentence pair. A side is None if it is not valid UTF-8 and the pair is to be dropped."""

    source: str | None
    target: str | None
    alignment: str = ""  # Pharaoh format, if there is one


class TextFiles:
    """Plain text: PREFIX.<source_lang>, PREFIX.<target_lang> and optionally PREFIX.<alignments>, each possibly .gz."""

    unit = "line"

    def __init__(self, prefix: Path, config: schema.Corpus, tag: str = "") -> None:
        """tag: stands before each source that is not blank, followed by a space."""
        for key in ("source_lang", "target_lang", "alignments"):
            suffix = getattr(config, key, None)
            if suffix and "/" in suffix:
                raise UserError(
                    f"data.{key}={suffix}: is a path; give what follows '{prefix}.' in the file's name, such as "
                    f"data.{key}={suffix.rpartition('/')[2].rpartition('.')[2] or 'en'}"
                )
        self.paths = [_text_file(prefix, lang) for lang in (config.source_lang, config.target_lang)]
        self.name = str(self.paths[0])
        self.tag, self.drop_invalid = tag, config.invalid_utf8 == "drop"
        self.alignments = None
        if isinstance(config, schema.FilesData) and config.alignments is not None:
            with contextlib.suppress(UserError):
                self.alignments = _text_file(prefix, config.alignments)
                self.paths.append(self.alignments)
        self.has_alignments = self.alignments is not None

    def __iter__(self) -> Iterator[Pair]:
        return itertools.chain.from_iterable(self.chunks())

    def chunks(self) -> Iterator["TextChunk"]:
        """Yield the lines of all files, CHUNK or fewer at a time. Raises UserError if their numbers differ."""
        files = [reading.raw_lines(path) for path in self.paths]
        first, rows, size = 1, list[tuple[bytes, ...]](), 0
        for row in itertools.zip_longest(*files):
            if None in row:
                if rows:
                    yield self._chunk(first, rows)
                ends = [first + len(rows) - (line is None) for line in row]
                raise self._unequal([end + sum(1 for _ in lines) for end, lines in zip(ends, files, strict=True)])
            rows.append(row)
            size += len(row[0]) + len(row[1])
            if len(rows) == CHUNK or size > CHARACTERS:
                yield self._chunk(first, rows)
                first, rows, size = first + len(rows), [], 0
        if rows:
            yield self._chunk(first, rows)

    def _chunk(self, first: int, rows: list[tuple[bytes, ...]]) -> "TextChunk":
        content = tuple(b"".join(lines) for lines in zip(*rows, strict=True))
        return TextChunk(tuple(self.paths), first, len(rows), content, self.drop_invalid, self.tag)

    def _unequal(self, lines: list[int]) -> UserError:
        if lines[0] != lines[1]:
            return UserError(
                f"{self.paths[0]} has {lines[0]} lines, but {self.paths[1]} has {lines[1]}; line N of one side must be "
                "the translation of line N of the other"
            )
        return UserError(
            f"{self.alignments}: has {'more' if lines[2] > lines[0] else 'fewer'} lines than {self.paths[0]}; "
            "line N must be the word alignment of pair N"
        )

    def __len__(self) -> int:
        """Count the source lines without decoding them."""
        return reading.count_lines(self.paths[0])


@dataclass(frozen=True)
class TextChunk:
    """Consecutive lines of parallel text files, not yet decoded."""

    paths: tuple[Path, ...]  # of sources, targets and possibly word alignments
    first: int  # number of the first line
    count: int
    content: tuple[bytes, ...]  # the lines of each file, with their ends
    drop_invalid: bool
    tag: str  # before each source

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Pair]:
        """Decode the pairs. Raises UserError that names file and line."""
        source, target = (
            reading.decode_corpus_lines(path, self.first, content, self.drop_invalid, reading.CONVERT_OR_DROP)
            for path, content in zip(self.paths[:2], self.content, strict=False)
        )
        if self.tag:
            source = [_tagged(self.tag, line) for line in source]
        if len(self.paths) == 2:  # noqa: PLR2004
            return itertools.starmap(Pair, zip(source, target, strict=True))
        return self._with_alignments(source, target)

    def _with_alignments(self, source: Iterable[str | None], target: Iterable[str | None]) -> Iterator[Pair]:
        path = self.paths[2]
        alignments = reading.decode_corpus_lines(path, self.first, self.content[2], False, reading.CONVERT)
        for number, (left, right, links) in enumerate(zip(source, target, alignments, strict=True), self.first):
            assert links is not None
            yield _with_alignment(Pair(left, right), links, f"{path}, line {number}")


def count_pairs(pairs: Iterable[Pair]) -> int:
    """Count the pairs of a source. Text is not decoded, so that its errors are not yet reported."""
    if isinstance(pairs, TextFiles | list):
        return len(pairs)
    if isinstance(pairs, Concatenation):
        return sum(map(count_pairs, pairs.parts))
    return sum(1 for _ in pairs)


def locate(pairs: Iterable[Pair], numbers: Sequence[int]) -> str:
    """Say where pairs of a split, numbered from 1, are in the user's files: "corpus/train.en, lines 3, 17"."""
    if isinstance(pairs, Concatenation):
        return "; ".join(locate(part, inner) for part, inner in pairs.find(numbers))
    name, unit = (pairs.name, pairs.unit) if isinstance(pairs, TextFiles | Table | HubSplit) else ("demo", "pair")
    return f"{name}, {unit}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


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

    def __init__(self, path: Path, columns: tuple[str, ...], header: bool = True, tag: str = "") -> None:
        """columns: of sources, targets and possibly word alignments. header: see reading.read_table. tag: see
        TextFiles."""
        self.path, self.name, self.columns, self.header, self.tag = path, str(path), columns, header, tag
        self.has_alignments = len(columns) > 2  # noqa: PLR2004
        self.paths = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def __iter__(self) -> Iterator[Pair]:
        pairs = _pairs(reading.read_table(self.path, self.header), self.columns)
        return (pair._replace(source=_tagged(self.tag, pair.source)) for pair in pairs) if self.tag else pairs


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

    def __iter__(self) -> Iterator[Pair]:
        return itertools.chain.from_iterable(self.parts)

    def find(self, numbers: Sequence[int]) -> Iterator[tuple[Iterable[Pair], list[int]]]:
        """Find the parts that contain the pairs of these numbers, from 1, each with the numbers within the part."""
        start = 0
        for part in self.parts:
            count = count_pairs(part)
            if inner := [number - start for number in numbers if start < number <= start + count]:
                yield part, inner
            start += count


def _tagged(tag: str, source: str | None) -> str | None:
    """Put the tag before a source, unless that is blank or invalid."""
    return source if source is None or reading.is_blank(source) else f"{tag} {source}"


def _pairs(rows: Iterable[reading.Row], columns: tuple[str, ...]) -> Iterator[Pair]:
    """Take pairs from table rows."""
    for location, row in rows:
        source, target, *links = (_cell(row, column, location) for column in columns)
        pair = Pair(source, target)
        yield _with_alignment(pair, links[0], location) if links else pair


def _cell(row: dict[str, Any], column: str, location: str) -> str:
    """Return the text of a column; a dot in its name separates the names of nested columns."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{location}: no column '{column}' {_hint(row, column, location)}")
        value = value[part]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{location}: column '{column}' holds {type(value).__name__}, not text")
    if not value.isascii() and LONE_SURROGATES.search(value):
        raise UserError(f"{location}: column '{column}' holds half of a surrogate pair, which is not a character")
    return value.replace("\n", " ")


def _hint(row: dict[str, Any], column: str, location: str) -> str:
    """Say which columns there are, and how to name one."""
    names = [f"{name}.{column}" for name, value in row.items() if isinstance(value, dict) and column in value]
    names += [name for name in map(str, row) if name.endswith(f".{column}")]
    there = f"(there are: {format_value(', '.join(map(str, row)))}); "
    if names:
        return f"{there}name a nested column as in data.source_column={names[0]}"
    hint = f"{there}set data.source_column, data.target_column (or data.alignments)"
    has_header = list(row) != [str(number) for number in range(1, 1 + len(row))]
    if has_header and reading.table_format(Path(location.rpartition(", ")[0])) in {"tsv", "csv"}:
        hint += f"; the first row must name the columns, unless you set {reading.NO_HEADER}"
    return hint


def _with_alignment(pair: Pair, links: str, location: str) -> Pair:
    """Add a word alignment to a pair. Raises UserError if it is malformed or links words that do not exist."""
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


# The splits of a configured corpus


Splits = dict[str, Iterable[Pair]]  # train, validation and possibly test
FileCounts = int | str | list["FileCounts"]


def splits(config: schema.Data) -> Splits:
    """Return the splits of a corpus, which are read at each iteration. Raises UserError that names file and line."""
    result = _splits(config)
    if config.extra and not isinstance(config, schema.MultilingualData):
        train = result["train"]
        parts = train.parts if isinstance(train, Concatenation) else [train]
        result["train"] = Concatenation([*parts, *_parts(config.extra, config, "data.extra")])
    return result


def _splits(config: schema.Data) -> Splits:
    if isinstance(config, schema.DemoData):
        triples = demo.generate(config.train_size, config.validation_size, config.test_size, config.seed)
        return {name: [Pair(*triple) for triple in split] for name, split in triples._asdict().items()}
    if isinstance(config, schema.MultilingualData):
        return _tagged_splits(config)
    if isinstance(config, schema.FilesData):
        parts = _parts_by_split(config)
        if config.alignments is not None and not any(part.has_alignments for split in parts.values() for part in split):
            raise UserError(
                f"data.alignments={config.alignments}: no split has such a file; expected a name like "
                f"{config.train[0]}.{config.alignments}"
            )
        for split in ("validation", "test"):
            _check_alignments(config.alignments, split, parts.get(split, []))
        return {split: some[0] if len(some) == 1 else Concatenation(some) for split, some in parts.items()}
    assert isinstance(config, schema.HubData)
    if config.path is None:
        return {split: HubSplit(config, name) for split, name in config.splits if name}
    folder = user_path(config.path)
    if not folder.is_dir():
        raise UserError(f"data.path={config.path}: no such folder")
    return {split: TextFiles(folder / name, config) for split, name in config.path_splits if name}


def _check_alignments(suffix: str | None, split: str, parts: Sequence[TextFiles | Table]) -> None:
    """Raises UserError if some files of a held-out split have word alignments and others do not: AER would count the
    links of the others as wrong."""
    without = [part for part in parts if not part.has_alignments]
    if suffix is not None and without and len(without) < len(parts):
        raise UserError(
            f"data.alignments={suffix}: {without[0].name} of data.{split} has no such file, but others of the split "
            "have; add it, or leave out data.alignments"
        )


def _tagged_splits(config: schema.MultilingualData) -> Splits:
    """Concatenate the corpora of all directions, with their tags before the sources."""
    parts: dict[str, list[TextFiles | Table]] = {}
    for corpus, files in zip(config.corpora, config.files(), strict=True):
        for split, those in _parts_by_split(files, corpus.tag).items():
            parts.setdefault(split, []).extend(those)
    return {split: Concatenation(some) for split, some in parts.items()}


def _parts_by_split(config: schema.FilesData, tag: str = "") -> dict[str, list[TextFiles | Table]]:
    names = {"train": config.train, "validation": config.validation, "test": config.test}
    return {split: _parts(paths, config, f"data.{split}", tag) for split, paths in names.items() if paths}


def _parts(names: list[str], config: schema.Corpus, key: str, tag: str = "") -> list[TextFiles | Table]:
    return [_part(path, config, key, tag) for name in names for path in _matches(name, config, key)]


def _matches(name: str, config: schema.Corpus, key: str) -> list[str]:
    """Return the tables and prefixes of plain text that match a pattern, sorted; another name stands for itself."""
    path = str(user_path(name))
    suffixes = [f".{config.source_lang}", f".{config.source_lang}.gz"]
    if not glob.has_magic(path) or any(Path(f"{path}{suffix}").exists() for suffix in ("", *suffixes)):
        return [name]
    result = {match for match in glob.glob(path) if Path(match).is_dir() or reading.table_format(Path(match))}
    for suffix in suffixes:
        result |= {match.removesuffix(suffix) for match in glob.glob(f"{path}{suffix}")}
    if not result:
        raise UserError(
            f"{key}={name}: matches neither a table (.tsv .csv .jsonl .parquet) nor, as a prefix of plain text, a file "
            f"{Path(name).name}{suffixes[0]}"
        )
    return sorted(result)


def _part(name: str, config: schema.Corpus, key: str, tag: str) -> TextFiles | Table:
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
        names = (config.source_lang, config.target_lang) if config.header else ("1", "2")
        columns = [config.source_column or names[0], config.target_column or names[1]]
        alignments = [config.alignments] if config.alignments and key != "data.extra" else []
        return Table(path, (*columns, *alignments), config.header, tag)
    text_files = [Path(f"{path}.{config.source_lang}{end}") for end in ("", ".gz")]
    if reading.table_format(path) and not path.is_file() and not any(file.exists() for file in text_files):
        raise UserError(f"{key}={name}: no such table")
    if path.is_file():
        prefix = plain = name.removesuffix(".gz")
        for language in (config.source_lang, config.target_lang):
            prefix = prefix.removesuffix(f".{language}")
        example = f"{key}={prefix}" if prefix != plain else f"PREFIX, so that PREFIX.{config.source_lang} is the source"
        raise UserError(
            f"{key}={name}: neither a table (.tsv .csv .jsonl .parquet) nor a prefix; for plain text give the path "
            f"without the language: {example}"
        )
    return TextFiles(path, config, tag)


def files(config: schema.Data) -> list[Path]:
    """List the corpus files, for the fingerprint; none for the demo and the hub. Raises UserError."""
    return [path for part in files_by_part(config) for path in part]


def files_by_part(config: schema.Data) -> list[list[Path]]:
    """List the files of each table and of each prefix of plain text."""
    read = splits(config).values() if config.kind != "demo" or config.extra else []
    parts = itertools.chain.from_iterable(map(_sources, read))
    return [part.paths for part in parts if isinstance(part, TextFiles | Table)]


def file_counts(config: schema.Data) -> dict[str, FileCounts]:
    """Count the files of each split, nested as the split is put together from several, with the tags of several
    directions."""
    read = splits(config) if config.kind != "demo" or config.extra else {}
    return {name: _structure(pairs) for name, pairs in sorted(read.items())}


def _structure(pairs: Iterable[Pair]) -> FileCounts:
    if isinstance(pairs, Concatenation):
        return [_structure(part) for part in pairs.parts]
    if not isinstance(pairs, TextFiles | Table):
        return 0
    return [pairs.tag, len(pairs.paths)] if pairs.tag else len(pairs.paths)


def _sources(pairs: Iterable[Pair]) -> Iterator[Iterable[Pair]]:
    """Yield the sources that a split concatenates."""
    if isinstance(pairs, Concatenation):
        for part in pairs.parts:
            yield from _sources(part)
    else:
        yield pairs
