"""Reading parallel text in all supported formats, and the errors for damaged text."""

import gzip
import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import values_of
from pydantic import TypeAdapter

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data.corpus import DemoPairs, Pair, Source, count_pairs, locate, splits

TEXTS = [
    ("a cat", "une chatte"),
    ('say "hi', 'dis "salut'),
    ("NA", "1.0"),
    ("x\u2028y\x85z", "t\u2029u"),
    ("007", "null"),
]

PAIRS = [Pair(*pair) for pair in TEXTS]


def data_config(*overrides: str) -> schema.Data:
    data: schema.Data = TypeAdapter(schema.Data).validate_python(values_of("train", [*overrides])["data"])
    return data


def files_config(**changes: Any) -> schema.Data:  # noqa: ANN401
    values = values_of("train", ["data=files", "data.target_lang=fr", "data.train=x", "data.validation=x"])["data"]
    changes = {key: str(value) if isinstance(value, Path) else value for key, value in changes.items()}
    data: schema.Data = TypeAdapter(schema.Data).validate_python(values | changes)
    return data


def pairs_of(sources: Iterable[Source]) -> list[Pair]:
    return list(chain.from_iterable(sources))


def read(path: Path | list[Path], **changes: Any) -> list[Pair]:  # noqa: ANN401
    train = list(map(str, path)) if isinstance(path, list) else path
    return pairs_of(splits(files_config(train=train, validation=train, **changes))["train"])


def write_text(prefix: Path, pairs: Iterable[tuple[str, ...]] = TEXTS) -> Path:
    for language, lines in zip(("en", "fr"), zip(*pairs, strict=True), strict=True):
        prefix.with_name(f"{prefix.name}.{language}").write_bytes("".join(f"{line}\n" for line in lines).encode())
    return prefix


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_text(tmp_path / "corpus")


# Plain text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"^data\.train: .*/missing\.en: no such file"),
        ("t.tsv", r"^data\.train=.*t\.tsv: no such table$"),
        ("corpus.en", r"without the language: PREFIX, so that PREFIX\.en is the source"),
        ("", r"^data\.train=/.*: is a folder, .*give the prefix of its files"),
        ("valid-*", r"^data\.train=\S*/valid-\*: matches neither a table .* file valid-\*\.en$"),
    ],
)
def test_what_names_no_corpus_is_explained(name: str, message: str, corpus: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(corpus.parent / name)


# Tables


def columns() -> dict[str, list[str]]:
    return {language: [pair[side] for pair in TEXTS[:4]] for side, language in enumerate(("en", "fr"))}


def delimited(separator: str, quote: str = "") -> str:
    rows = [("en", "fr"), *TEXTS[:4]]
    cells = ([f"{quote}{cell.replace(quote, 2 * quote) if quote else cell}{quote}" for cell in row] for row in rows)
    return "".join(f"{separator.join(row)}\n" for row in cells)


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: write_text(path, TEXTS[:4]),
    "t.tsv": lambda path: path.write_text(delimited("\t"), encoding="utf-8"),
    "t.csv": lambda path: path.write_text(delimited(",", '"'), encoding="utf-8"),
    "t.jsonl": lambda path: datasets.Dataset.from_dict(columns()).to_json(path),
    "t.parquet": lambda path: datasets.Dataset.from_dict(columns()).to_parquet(path),
    "saved": lambda path: datasets.Dataset.from_dict(columns()).save_to_disk(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_text_in_each_format(name: str, tmp_path: Path) -> None:
    """Cells such as NA, 1.0 or a single quotation mark are read as plain text, and lines end at newlines alone."""
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name) == PAIRS[:4]
    if name.endswith(("tsv", "csv", "jsonl")):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert read(tmp_path / f"{name}.gz") == PAIRS[:4]


@pytest.mark.parametrize("name", ["p[1].parquet", "saved"])
def test_pictures_in_other_columns_are_not_decoded(name: str, tmp_path: Path) -> None:
    broken = datasets.Dataset.from_dict({**columns(), "image": [{"bytes": b"none", "path": None}] * 4})
    table = broken.cast_column("image", datasets.Image())
    (table.save_to_disk if name == "saved" else table.to_parquet)(tmp_path / name)
    assert read(tmp_path / name) == PAIRS[:4]
    with pytest.raises(UserError, match="cannot be read as a table"):
        read(tmp_path / name, source_column="of no column")


def test_columns_by_name_also_nested(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": 1, "translation": {"en": "a", "fr": "b"}}\n')
    assert read(path, source_column="translation.en", target_column="translation.fr") == [Pair("a", "b")]
    with pytest.raises(UserError, match=r"t\.jsonl, line 1: no column 'en' \(there are: id, translation\); set "):
        read(path)


@pytest.mark.parametrize(("suffix", "separator"), [("tsv", "\t"), ("csv", ",")])
def test_tables_without_a_header_have_numbered_columns(suffix: str, separator: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{suffix}"
    rows = [["a", "b", "x"], ["c", "d", "y"]]

    def write(*cells: list[str]) -> None:
        path.write_text("".join(f"{separator.join(row)}\n" for row in cells))

    write(*(row[:2] for row in rows))
    assert read(path, header=False) == [Pair("a", "b"), Pair("c", "d")]
    for broken, message in (
        ([["a", "b"], ["c", "d", "y"]], "line 2: has 3 columns, but line 1 has 2"),
        ([["a", "b"], ["", "d"]], "line 2: column 1 is empty"),
        ([["a", "b"], ["c", " "]], "line 2: column 2 is empty"),
        (rows, "line 1: has 3 columns; which are the source and the target? Set data.source_column=1 data.target"),
    ):
        write(*broken)
        with pytest.raises(UserError, match=re.escape(f"{path}, {message}")):
            read(path, header=False)
    assert read(path, header=False, source_column="3", target_column="1") == [Pair("x", "a"), Pair("y", "c")]
    with pytest.raises(UserError, match=r"no column 'en' \(there are: a, b, x\); .*data\.header=false"):
        read(path)


def test_options_of_tables_are_refused_for_plain_text(corpus: Path) -> None:
    for changes in ({"header": False}, {"source_column": "a"}, {"target_column": "b"}):
        with pytest.raises(UserError, match=r"is for tables .* but all files are plain text; leave it out"):
            splits(files_config(train=corpus, validation=corpus, **changes))


def test_options_of_tables_are_for_extra_pairs_too(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "more.tsv").write_text("a\tb\none\tun\n")
    options = {"extra": [str(tmp_path / "more.tsv")], "source_column": "a", "target_column": "b"}
    result = splits(files_config(train=corpus, validation=corpus, **options))
    assert pairs_of(result["train"])[-1] == Pair("one", "un")


# The hub and the demo


def test_a_hub_corpus_can_come_from_a_folder(tmp_path: Path) -> None:
    for name in ("train", "val", "test_2016_flickr"):
        write_text(tmp_path / name)
    config = data_config("data=multi30k", "data.target_lang=fr", "data.path=x")
    result = splits(config.model_copy(update={"path": str(tmp_path)}))
    assert {name: len(pairs_of(sources)) for name, sources in result.items()} == dict.fromkeys(
        ("train", "validation", "test"), 5
    )
    with pytest.raises(UserError, match=r"data\.path=x: no such folder"):
        splits(config)


def test_a_hub_corpus_is_loaded_by_its_splits_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
        requests.append((args, kwargs))
        return datasets.Dataset.from_list([{"translation": {"de": "a", "en": "b"}}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = ["data=hub", "data.id=o/n", "data.name=de-en", "data.revision=v1"]
    config = data_config(*names, "data.source_lang=de", "data.target_lang=en")
    assert pairs_of(splits(config)["test"]) == [Pair("a", "b")]
    assert requests == [(("o/n", "de-en"), {"split": "test", "revision": "v1"})]


def test_a_hub_corpus_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise OSError("no route\ndetails")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"^data\.id=no/such.*cannot be loaded from the hub \(no route\); check"):
        pairs_of(splits(data_config("data=hub", "data.id=no/such"))["train"])


def test_the_demo_has_gold_alignments_and_takes_more_pairs(tmp_path: Path) -> None:
    config = data_config("data.train_size=5", "data.validation_size=2", "data.test_size=3")
    pairs = {name: pairs_of(sources) for name, sources in splits(config).items()}
    assert {name: len(some) for name, some in pairs.items()} == {"train": 5, "validation": 2, "test": 3}
    assert all(pair.alignment for some in pairs.values() for pair in some)
    at_the_front = [*pairs["test"], *pairs["validation"], *pairs["train"]]
    assert at_the_front == [*DemoPairs(0, 10)]
    more = config.model_copy(update={"extra": [str(write_text(tmp_path / "more"))]})
    assert pairs_of(splits(more)["train"]) == pairs["train"] + PAIRS


# Word alignments


def test_word_alignments_come_with_plain_text_where_there_are_some(corpus: Path) -> None:
    links = ["0-0 1-1", "0-0 1p1", "0-0", "", "0-0"]
    corpus.with_name("corpus.align").write_text("".join(f"{line}\n" for line in links))
    other = write_text(corpus.with_name("other"))
    result = splits(files_config(train=corpus, validation=other, alignments="align"))
    assert [pair.alignment for pair in pairs_of(result["train"])] == links
    assert {pair.alignment for pair in pairs_of(result["validation"])} == {""}
    assert corpus.with_name("corpus.align") in result["train"][0].files
    with pytest.raises(UserError, match=r"data\.alignments=aling: no split has such a file"):
        splits(files_config(train=corpus, validation=other, alignments="aling"))
    table = corpus.with_name("t.tsv")  # here they are a column
    table.write_text("en\tfr\tlinks\na cat\tune chatte\t0-0 1-1\n")
    assert read(table, alignments="links") == [Pair("a cat", "une chatte", "0-0 1-1")]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_word_alignments_of_a_part_of_a_held_out_split_are_refused(split: str, corpus: Path) -> None:
    other = write_text(corpus.with_name("other"))
    corpus.with_name("corpus.align").write_text("0-0\n" * 5)
    both = [str(corpus), str(other)]
    held_out = {"validation": corpus, split: both}
    with pytest.raises(UserError, match=rf"other\.en of data\.{split} has no such file, but others of the split have"):
        splits(files_config(train=corpus, **held_out, alignments="align"))
    splits(files_config(train=both, validation=corpus, test=other, alignments="align"))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("0-0\n" * 4, r"corpus\.en has 5 lines, but .*corpus\.align has 4;"),
        ("0-0\n" * 6, r"corpus\.en has 5 lines, but .*corpus\.align has 6;"),
        ("0-0\n0:0\n" + "0-0\n" * 3, "align, line 2: alignment token '0:0'"),
        ("0-0\n" * 2 + "3-0\n0-0\n0-0\n", "align, line 3: link 3-0 is out of range: the source has 1 words, "),
    ],
)
def test_broken_word_alignments_are_refused_with_their_line(links: str, message: str, corpus: Path) -> None:
    corpus.with_name("corpus.align").write_text(links)
    with pytest.raises(UserError, match=message):
        read(corpus, alignments="align")


def test_word_alignments_count_words_that_spaces_separate(corpus: Path) -> None:
    pairs = [("a\xa0b  c d", "x\u2003y z\tw"), ("a b", "x y")]
    write_text(corpus, pairs)
    corpus.with_name("corpus.align").write_text("0-0 1-1 2-1\n1-1\n")
    assert [pair[:2] for pair in read(corpus, alignments="align")] == pairs
    corpus.with_name("corpus.align").write_text("3-1\n1-1\n")
    with pytest.raises(UserError, match="link 3-1 is out of range: the source has 3 words, the target 2 "):
        read(corpus, alignments="align")


# Several files


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_text(tmp_path / f"part-0{number}", TEXTS[number : number + 1])
    WRITERS["t.tsv"](tmp_path / "part-03.tsv")
    (tmp_path / "part-04.en.gz").write_bytes(gzip.compress(b"zipped"))  # without a final newline
    (tmp_path / "part-04.fr").write_text("comprim")
    config = files_config(
        train=f"{tmp_path}/part-*",
        validation=f"{tmp_path}/part-0[01]",
        test=f"{tmp_path}/*.tsv",
        extra=[f"{tmp_path}/part-0[12]"],
    )
    result = splits(config)
    extra = PAIRS[1:3]
    assert pairs_of(result["train"]) == [*PAIRS[:3], *PAIRS[:4], Pair("zipped", "comprim"), *extra]
    assert pairs_of(result["validation"]) == PAIRS[:2]
    assert pairs_of(result["test"]) == PAIRS[:4]
    assert count_pairs(result["train"]) == 10
    assert locate(result["train"], [3, 5, 6, 8]) == (
        f"{tmp_path}/part-02.en, line 1; {tmp_path}/part-03.tsv, rows 2, 3; {tmp_path}/part-04.en.gz, line 1"
    )


def test_a_name_with_the_characters_of_a_pattern_is_a_name(tmp_path: Path) -> None:
    write_text(tmp_path / "a1x", TEXTS[1:2])
    assert read(write_text(tmp_path / "a[1]*", TEXTS[:1])) == PAIRS[:1]
