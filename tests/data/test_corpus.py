"""Reading parallel text in all its forms, and refusing what is broken."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import values_of
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from pydantic import TypeAdapter

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data import text as reading
from nmt.data.corpus import Pair, count_pairs, files, locate, splits

PAIRS = [
    ("a cat", "une chatte"),
    ('say "hi', 'dis "salut'),
    ("NA", "null"),
    ("1.0", "007"),
    ("x\u2028y\x85z", "t\u2029u"),
]


def files_config(**changes: Any) -> schema.Data:  # noqa: ANN401
    overrides = ["data=files", "data.target_lang=fr", *(f"data.{key}={value}" for key, value in changes.items())]
    data: schema.Data = TypeAdapter(schema.Data).validate_python(values_of("train", overrides)["data"])
    return data


def write_text(prefix: Path, pairs: list[tuple[str, str]] = PAIRS) -> Path:
    for lang, lines in zip(("en", "fr"), zip(*pairs, strict=True), strict=True):
        prefix.with_name(f"{prefix.name}.{lang}").write_bytes("".join(f"{line}\n" for line in lines).encode())
    return prefix


def read(**changes: Any) -> list[Pair]:  # noqa: ANN401
    return list(splits(files_config(**changes))["train"])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_text(tmp_path / "corpus")


def test_plain_text_splits_at_newlines_alone(corpus: Path) -> None:
    assert read(train=corpus, validation=corpus) == [Pair(*pair) for pair in PAIRS]


def test_gzipped_text(corpus: Path) -> None:
    for lang in ("en", "fr"):
        plain = corpus.with_name(f"corpus.{lang}")
        (corpus.with_name(f"zipped.{lang}.gz")).write_bytes(gzip.compress(plain.read_bytes()))
    zipped = corpus.with_name("zipped")
    assert read(train=zipped, validation=corpus) == read(train=corpus, validation=corpus)


def test_windows_files_read_like_others(tmp_path: Path) -> None:
    (tmp_path / "w.en").write_bytes("\ufeffone\r\ntwo\r\n".encode())
    (tmp_path / "w.fr").write_bytes(b"un\r\ndeux")
    assert read(train=tmp_path / "w", validation=tmp_path / "w") == [Pair("one", "un"), Pair("two", "deux")]


def to_tsv(path: Path) -> None:
    path.write_text("en\tfr\n" + "".join(f"{s}\t{t}\n" for s, t in PAIRS[:4]), encoding="utf-8")


def to_csv(path: Path) -> None:
    quoted = "".join(f'"{s.replace(chr(34), chr(34) * 2)}","{t.replace(chr(34), chr(34) * 2)}"\n' for s, t in PAIRS[:4])
    path.write_text("en,fr\n" + quoted, encoding="utf-8")


def columns() -> dict[str, list[str]]:
    return {lang: [pair[side] for pair in PAIRS[:4]] for side, lang in enumerate(("en", "fr"))}


def to_json(path: Path) -> None:
    datasets.Dataset.from_dict(columns()).to_json(path)


def to_parquet(path: Path) -> None:
    datasets.Dataset.from_dict(columns()).to_parquet(path)


def to_folder(path: Path) -> None:
    datasets.Dataset.from_dict(columns()).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("t.tsv", to_tsv), ("t.csv", to_csv), ("t.jsonl", to_json), ("t.parquet", to_parquet), ("saved", to_folder)],
)
def test_tables(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    """Cells such as NA, 1.0 or a lone quotation mark are text like any other."""
    write(tmp_path / name)
    assert read(train=tmp_path / name, validation=tmp_path / name) == [Pair(*pair) for pair in PAIRS[:4]]


def test_a_folder_without_a_dataset_is_refused_unread(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = corpus.parent / "empty"
    empty.mkdir()
    full = files_config(train=corpus.parent, validation=corpus)
    bare = files_config(train=corpus, validation=empty)
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("the whole folder is read"))
    remedy = rf"give the prefix of its files, such as data\.train={corpus}$"
    with pytest.raises(UserError, match=rf"^data\.train={corpus.parent}: is a folder, .*{remedy}"):
        files(full)
    with pytest.raises(UserError, match=rf"such as data\.validation={empty}/PREFIX$"):
        files(bare)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"alignments": "c/train.al"},
            r"^data\.alignments=c/train\.al: is a path; give .* such as data\.alignments=al$",
        ),
        (
            {"source_lang": "a/b"},
            r"^data\.source_lang=a/b: is a path; give what follows '.*corpus\.' in the file's name",
        ),
        ({"target_lang": "x/train.fr"}, r"^data\.target_lang=x/train\.fr: is a path; .* such as data\.target_lang=fr$"),
        ({"source_lang": "en/"}, r"such as data\.source_lang=en$"),
    ],
)
def test_a_path_for_a_suffix_is_refused(changes: dict[str, str], message: str, corpus: Path) -> None:
    with pytest.raises(UserError, match=message):
        splits(files_config(train=corpus, validation=corpus, **changes))


def test_old_macs_line_ends_are_named_with_the_remedy(corpus: Path) -> None:
    mac = corpus.with_name("corpus.en")
    mac.write_bytes(mac.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(
        UserError, match=rf"corpus\.en: its lines end in carriage returns .* tr '\\r' '\\n' < {mac} > NEW"
    ):
        read(train=corpus, validation=corpus)
    mac.write_bytes(b"one\rline\n" + mac.read_bytes())
    with pytest.raises(UserError, match=r"corpus\.en has 2 lines, but"):
        read(train=corpus, validation=corpus)


def test_a_folder_of_several_splits_is_explained(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns())}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"holds several splits; give one of them, such as .*saved/train"):
        read(train=tmp_path / "saved", validation=tmp_path / "saved")


def test_gzipped_tables(tmp_path: Path) -> None:
    to_tsv(tmp_path / "t.tsv")
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress((tmp_path / "t.tsv").read_bytes()))
    path = tmp_path / "t.tsv.gz"
    assert read(train=path, validation=path) == [Pair(*pair) for pair in PAIRS[:4]]


def test_columns_by_name_also_nested(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": 1, "translation": {"en": "a", "fr": "b"}}\n')
    pairs = read(train=path, validation=path, source_column="translation.en", target_column="translation.fr")
    assert pairs == [Pair("a", "b")]
    hint = r"t\.jsonl, line 1: no column 'en' \(there are: id, translation\); .* data\.source_column=translation\.en$"
    with pytest.raises(UserError, match=hint):
        read(train=path, validation=path)


@pytest.mark.parametrize(("suffix", "separator"), [("tsv", "\t"), ("csv", ","), ("tsv.gz", "\t")])
def test_tables_without_a_header_have_numbered_columns(suffix: str, separator: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{suffix}"
    content = "".join(f"{separator.join(row)}\n" for row in (("a", "b", "x"), ("c", "d", "y"))).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert read(train=path, validation=path, header=False) == [Pair("a", "b"), Pair("c", "d")]
    chosen = {"source_column": "3", "target_column": "1"}
    assert read(train=path, validation=path, header=False, **chosen) == [Pair("x", "a"), Pair("y", "c")]
    with pytest.raises(UserError, match=r"no column 'en' \(there are: a, b, x\); .*data\.header=false"):
        read(train=path, validation=path)
    with pytest.raises(UserError, match=r"no column '4' \(there are: 1, 2, 3\); set [^;]*$"):
        read(train=path, validation=path, header=False, source_column="4")


def test_columns_of_json_have_names(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"en": "a", "fr": "b"}\n')
    with pytest.raises(UserError, match=r"^data\.header=false: .*t\.jsonl names its columns itself"):
        read(train=path, validation=path, header=False)


def test_a_mistyped_table_is_no_prefix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.train=.*nope\.tsv: no such table$"):
        read(train=tmp_path / "nope.tsv", validation=tmp_path / "nope.tsv")
    for language in ("en", "fr"):
        (tmp_path / f"nope.tsv.{language}").write_text(f"{language}\n")
    assert read(train=tmp_path / "nope.tsv", validation=tmp_path / "nope.tsv") == [Pair("en", "fr")]


def test_a_hub_corpus_can_come_from_a_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "train")
    write_text(tmp_path / "val")
    write_text(tmp_path / "test_2016_flickr")
    overrides = ["data=multi30k", "data.target_lang=fr", f"data.path={tmp_path}"]
    config: schema.Data = TypeAdapter(schema.Data).validate_python(values_of("train", overrides)["data"])
    assert {name: len(list(pairs)) for name, pairs in splits(config).items()} == dict.fromkeys(
        ("train", "validation", "test"), 5
    )
    assert len(files(config)) == 6


def test_a_hub_corpus_is_loaded_by_its_splits_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: object, **kwargs: object) -> list[dict[str, Any]]:
        asked.append((args, kwargs))
        return [{"translation": {"de": "a", "en": "b"}}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(reading, "hub_answers", lambda _: True)
    overrides = [
        "data=hub",
        "data.id=o/n",
        "data.name=de-en",
        "data.revision=v1",
        "data.source_lang=de",
        "data.target_lang=en",
    ]
    config: schema.Data = TypeAdapter(schema.Data).validate_python(values_of("train", overrides)["data"])
    assert list(splits(config)["test"]) == [Pair("a", "b")]
    assert asked == [(("o/n", "de-en"), {"split": "test", "revision": "v1"})]


@pytest.mark.parametrize(
    ("error", "offline"), [(OSError("no route"), True), (HfHubHTTPError.__new__(HfHubHTTPError), False)]
)
def test_a_hub_out_of_reach_is_asked_once(error: Exception, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, modes = [], []

    def dataset_info(_: HfApi, dataset: str, timeout: float) -> None:
        asked.append((dataset, timeout))
        raise error

    def load_dataset(*_: object, **__: object) -> None:
        modes.append(datasets.config.HF_HUB_OFFLINE)
        raise OSError("not there")

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    overrides = ["data=hub", f"data.id=no/such-{offline}"]
    config: schema.Data = TypeAdapter(schema.Data).validate_python(values_of("train", overrides)["data"])
    for split in ("train", "test"):
        with pytest.raises(UserError, match=r"^data\.id=no/such.*cannot be loaded from the hub \(not there\)"):
            list(splits(config)[split])
    assert asked == [(f"no/such-{offline}", 10)]
    assert modes == [offline, offline]


def test_the_demo_carries_gold_alignments() -> None:
    config: schema.Data = TypeAdapter(schema.Data).validate_python(
        values_of("train", ["data.train_size=5", "data.validation_size=2", "data.test_size=3"])["data"]
    )
    read = {name: list(pairs) for name, pairs in splits(config).items()}
    assert {name: len(pairs) for name, pairs in read.items()} == {"train": 5, "validation": 2, "test": 3}
    assert all(pair.alignment for pairs in read.values() for pair in pairs)
    assert files(config) == []


def break_lengths(corpus: Path) -> None:
    with corpus.with_name("corpus.en").open("a") as file:
        file.write("one more\nand more\n")


def break_utf8(corpus: Path) -> None:
    corpus.with_name("corpus.fr").write_bytes(b"un\ndeu\xff\n" + b"x\n" * 3)


def empty(corpus: Path) -> None:
    corpus.with_name("corpus.en").write_bytes(b"")


def remove(corpus: Path) -> None:
    corpus.with_name("corpus.fr").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_lengths, r"corpus\.en has 7 lines, but .*corpus\.fr has 5"),
        (break_utf8, r"corpus\.fr, line 2: not valid UTF-8 \(byte 4 of the line\).*data\.invalid_utf8=drop"),
        (empty, r"corpus\.en: is empty"),
        (remove, r"corpus\.fr: no such file"),
    ],
)
def test_broken_text_is_refused_by_file_and_line(damage: Callable[[Path], None], message: str, corpus: Path) -> None:
    damage(corpus)
    with pytest.raises(UserError, match=message) as error:
        read(train=corpus, validation=corpus)
    assert "\n" not in str(error.value)


def test_sides_of_different_length_are_counted_the_other_way_round_too(corpus: Path) -> None:
    corpus.with_name("corpus.en").write_text("only one\n")
    with pytest.raises(UserError, match=r"corpus\.en has 1 lines, but .*corpus\.fr has 5"):
        read(train=corpus, validation=corpus)


def test_broken_lines_can_be_dropped_with_their_partners(corpus: Path) -> None:
    break_utf8(corpus)
    pairs = read(train=corpus, validation=corpus, invalid_utf8="drop")
    assert len(pairs) == 5
    assert pairs[1] == Pair('say "hi', None)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_broken_tables_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b'en,fr\n"a,b\nc,d,e,f\n{{{')
    with pytest.raises(UserError, match=name) as error:
        read(train=path, validation=path)
    assert "\n" not in str(error.value)


def test_invalid_utf8_in_a_table_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_bytes(b"en\tfr\na\tb\n\xff\tc\n")
    with pytest.raises(UserError, match=r"t\.tsv, line 3: not valid UTF-8"):
        read(train=path, validation=path)


def test_a_file_given_for_a_prefix_is_explained(corpus: Path) -> None:
    name = corpus.with_name("corpus.en")
    with pytest.raises(UserError, match=rf"give the path without the language: data\.train={corpus}$"):
        read(train=name, validation=corpus)
    name.with_suffix(".en.gz").write_bytes(gzip.compress(name.read_bytes()))
    with pytest.raises(UserError, match=rf"give the path without the language: data\.train={corpus}$"):
        read(train=name.with_suffix(".en.gz"), validation=corpus)
    for other in ("sentences.txt", "sentences.txt.gz"):
        name.with_name(other).write_bytes(name.read_bytes())
        with pytest.raises(UserError, match=r"without the language: PREFIX, so that PREFIX\.en is the source"):
            read(train=name.with_name(other), validation=corpus)


def test_parquet_in_gzip_is_refused_with_the_remedy(tmp_path: Path) -> None:
    to_parquet(tmp_path / "t.parquet")
    path = tmp_path / "t.parquet.gz"
    path.write_bytes(gzip.compress((tmp_path / "t.parquet").read_bytes()))
    with pytest.raises(UserError, match=r"t\.parquet\.gz: Parquet files contain their own compression"):
        read(train=path, validation=path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    overrides = ["data=multi30k", f"data.path={tmp_path}/nowhere"]
    config: schema.Data = TypeAdapter(schema.Data).validate_python(values_of("train", overrides)["data"])
    with pytest.raises(UserError, match=r"data\.path=.*nowhere: no such folder"):
        splits(config)


def test_word_alignments_come_with_plain_text_where_there_are_some(corpus: Path) -> None:
    links = ["0-0 1-1", "0-0 1p1", "0-0", "", "0-0"]
    other = write_text(corpus.with_name("other"))
    corpus.with_name("corpus.align").write_text("".join(f"{line}\n" for line in links))
    config = files_config(train=corpus, validation=other, alignments="align")
    assert [pair.alignment for pair in splits(config)["train"]] == links
    assert {pair.alignment for pair in splits(config)["validation"]} == {""}
    assert corpus.with_name("corpus.align") in files(config)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_word_alignments_of_a_part_of_a_held_out_split_are_refused(split: str, corpus: Path) -> None:
    other = write_text(corpus.with_name("other"))
    corpus.with_name("corpus.align").write_text("0-0\n" * 5)
    both = f"[{corpus},{other}]"
    held_out = {"validation": corpus, split: both}
    with pytest.raises(UserError, match=rf"other\.en of data\.{split} has no such file, but others of the split have"):
        splits(files_config(train=corpus, **held_out, alignments="align"))
    splits(files_config(train=both, validation=corpus, test=other, alignments="align"))


def test_word_alignments_of_tables_and_plain_text_together(corpus: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"
    table.write_text("en\tfr\talign\na cat\tune chatte\t0-0 1-1\n")
    config = files_config(train=table, validation=corpus, alignments="align")
    assert [pair.alignment for pair in splits(config)["train"]] == ["0-0 1-1"]
    with pytest.raises(UserError, match=r"corpus\.en of data\.validation has no such file, but others"):
        splits(files_config(train=table, validation=f"[{table},{corpus}]", alignments="align"))


def test_word_alignments_are_a_column_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "t.tsv"
    table.write_text("en\tfr\tlinks\na cat\tune chatte\t0-0 1-1\n")
    config = files_config(train=table, validation=table, alignments="links")
    assert list(splits(config)["train"]) == [Pair("a cat", "une chatte", "0-0 1-1")]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("0-0\n" * 4, "align: has fewer lines than"),
        ("0-0\n" * 6, "align: has more lines than"),
        ("0-0\n0:0\n" + "0-0\n" * 3, "align, line 2: alignment token '0:0'"),
        (
            "0-0\n" * 2 + "3-0\n0-0\n0-0\n",
            "align, line 3: link 3-0 is out of range: the source has 1 words, ",
        ),
    ],
)
def test_broken_word_alignments_are_refused_with_their_line(links: str, message: str, corpus: Path) -> None:
    corpus.with_name("corpus.align").write_text(links)
    with pytest.raises(UserError, match=message):
        list(splits(files_config(train=corpus, validation=corpus, alignments="align"))["train"])


def test_word_alignments_count_words_that_spaces_separate(corpus: Path) -> None:
    pairs = [("a\xa0b  c d", "x\u2003y z\tw"), ("a b", "x y")]
    write_text(corpus, pairs)
    corpus.with_name("corpus.align").write_text("0-0 1-1 2-1\n1-1\n")
    config = files_config(train=corpus, validation=corpus, alignments="align")
    assert [pair[:2] for pair in splits(config)["train"]] == pairs
    corpus.with_name("corpus.align").write_text("3-1\n1-1\n")
    with pytest.raises(UserError, match="link 3-1 is out of range: the source has 3 words, the target 2 "):
        list(splits(config)["train"])


def test_a_suffix_that_no_split_has_is_refused(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"data\.alignments=aling: no split has such a file"):
        splits(files_config(train=corpus, validation=corpus, alignments="aling"))


def test_more_pairs_for_training_come_after_the_others(corpus: Path, tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "more", [("a", "b"), ("c", "d")])
    table = tmp_path / "t.tsv"
    table.write_text("en\tfr\ne\tf\n")
    config = files_config(train=corpus, validation=corpus, test=corpus, extra=f"[{prefix},{table}]")
    found = splits(config)
    added = [Pair("a", "b"), Pair("c", "d"), Pair("e", "f")]
    plain = [Pair(*pair) for pair in PAIRS]
    assert list(found["train"]) == [*plain, *added]
    assert list(found["validation"]) == list(found["test"]) == plain
    assert {tmp_path / "more.en", tmp_path / "more.fr", table} < set(files(config))
    count = len(PAIRS)
    assert locate(found["train"], [2, count + 1, count + 2, count + 3]) == (
        f"{corpus}.en, line 2; {prefix}.en, lines 1, 2; {table}, row 1"
    )


def test_every_kind_of_corpus_takes_more_pairs(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "more", [("a", "b")])
    table = tmp_path / "t.tsv"
    table.write_text("en\tfr\ne\tf\n")
    values = values_of("train", ["data.train_size=3", f"data.extra=[{prefix},{table}]"])["data"]
    demo: schema.Data = TypeAdapter(schema.Data).validate_python(values)
    assert list(splits(demo)["train"])[3:] == [Pair("a", "b"), Pair("e", "f")]
    assert files(demo) == [tmp_path / "more.en", tmp_path / "more.fr", table]
    with pytest.raises(UserError, match=r"nowhere\.en: no such file"):
        splits(demo.model_copy(update={"extra": ["nowhere"]}))


def test_several_parts_are_read_one_after_the_other(tmp_path: Path) -> None:
    plain = [Pair(*pair) for pair in PAIRS]
    for number in (2, 0, 1):
        write_text(tmp_path / f"part-0{number}", PAIRS[number : number + 1])
    to_tsv(tmp_path / "part-03.tsv")
    (tmp_path / "part-04.en.gz").write_bytes(gzip.compress(b"zipped\n"))
    (tmp_path / "part-04.fr").write_text("comprim\n")
    to_parquet(tmp_path / "part-05.parquet")
    tail = [Pair("zipped", "comprim"), *plain[:4]]
    parts = f"[{tmp_path}/part-00,{tmp_path}/part-02]"
    assert read(train=parts, validation=tmp_path / "part-00") == [plain[0], plain[2]]
    config = files_config(train=f"'{tmp_path}/part-*'", validation=f"'{tmp_path}/part-0[01]'", test=f"{tmp_path}/*.tsv")
    found = splits(config)
    assert list(found["train"]) == [*plain[:3], *plain[:4], *tail]
    assert list(found["validation"]) == plain[:2]
    assert list(found["test"]) == plain[:4]
    assert locate(found["train"], [3, 5, 8]) == (
        f"{tmp_path}/part-02.en, line 1; {tmp_path}/part-03.tsv, row 2; {tmp_path}/part-04.en.gz, line 1"
    )
    extra = files_config(train=parts, validation=tmp_path / "part-00", extra=f"'{tmp_path}/part-0[12]'")
    assert list(splits(extra)["train"]) == [plain[0], plain[2], plain[1], plain[2]]
    assert [path.name for path in files(extra)[:4]] == ["part-00.en", "part-00.fr", "part-02.en", "part-02.fr"]


def test_a_pattern_without_matches_is_refused(corpus: Path) -> None:
    with pytest.raises(
        UserError, match=r"^data\.validation=\S*/valid-\*: matches neither a table .* file valid-\*\.en$"
    ):
        splits(files_config(train=corpus, validation=f"{corpus.parent}/valid-*"))


def test_a_name_with_the_characters_of_a_pattern_is_a_name(tmp_path: Path) -> None:
    prefix = write_text(tmp_path / "a[1]*", PAIRS[:1])
    write_text(tmp_path / "a1x", PAIRS[1:2])
    assert read(train=f"'{prefix}'", validation=f"'{prefix}'") == [Pair(*PAIRS[0])]


def test_errors_in_a_part_name_its_line(tmp_path: Path) -> None:
    for number in (0, 1):
        write_text(tmp_path / f"part-{number}")
    (tmp_path / "part-1.fr").write_bytes(b"un\ndeux\n\xff\nquatre\ncinq\n")
    with pytest.raises(UserError, match=r"part-1\.fr, line 3: not valid UTF-8"):
        read(train=f"'{tmp_path}/part-*'", validation=tmp_path / "part-0")


def test_pairs_are_counted_without_decoding(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "more.en").write_bytes(b"\xff\n\nlast")
    (tmp_path / "more.fr").write_bytes(b"un\n\ndeux\n")
    to_tsv(tmp_path / "t.tsv")
    config = files_config(train=f"[{corpus},{tmp_path}/more,{tmp_path}/t.tsv]", validation=corpus)
    assert count_pairs(splits(config)["train"]) == len(PAIRS) + 3 + 4
