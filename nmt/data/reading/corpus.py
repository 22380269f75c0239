"""The user's parallel corpus: the demo, plain text, tables, the Hugging Face hub. Only preparation needs this."""

import glob
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data.demo import corpus as demo
from nmt.data.reading import text as reading
from nmt.data.reading.sources import Concatenation, HubSplit, Pair, Table, TextFiles

Splits = dict[str, Iterable[Pair]]  # train, validation and possibly test
FileCounts = int | str | list["FileCounts"]


def splits(config: schema.Data) -> Splits:
    """The splits of a corpus, read at each iteration. Raises UserError that names file and line."""
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
        return _tagged(config)
    if isinstance(config, schema.FilesData):
        parts = _parts_by_split(config)
        if config.alignments is not None and not any(part.has_alignments for split in parts.values() for part in split):
            raise UserError(
                f"data.alignments={config.alignments}: no split has such a file; expected a name like "
                f"{config.train[0]}.{config.alignments}"
            )
        for split in ("validation", "test"):
            _check_alignments(config.alignments, split, parts.get(split, []))
        return {split: each[0] if len(each) == 1 else Concatenation(each) for split, each in parts.items()}
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


def _tagged(config: schema.MultilingualData) -> Splits:
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
    """The tables and the prefixes of plain text that match a pattern, sorted; a name that is none stands for itself."""
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
    """The corpus files, for the fingerprint; none for the demo and the hub. Raises UserError."""
    return [path for part in files_by_part(config) for path in part]


def files_by_part(config: schema.Data) -> list[list[Path]]:
    """The files of each table and of each prefix of plain text."""
    read = splits(config).values() if config.kind != "demo" or config.extra else []
    parts = itertools.chain.from_iterable(map(_sources, read))
    return [part.paths for part in parts if isinstance(part, TextFiles | Table)]


def file_counts(config: schema.Data) -> dict[str, FileCounts]:
    """The number of files of each split, nested as the split is put together from several, with the tags of several
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
    """What a split is put together from."""
    if isinstance(pairs, Concatenation):
        for part in pairs.parts:
            yield from _sources(part)
    else:
        yield pairs
