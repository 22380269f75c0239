"""Damaged and unusual corpora: read with the expected counts, or refused in one line that names file and line."""

import gzip
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from conftest import values_of

from nmt.config.checks import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus

pytestmark = pytest.mark.no_cover  # runs hundreds of corpora through code that tests/data covers
PAIRS = [(f"the number {n} and word{n % 7} here", f"le nombre {n} et mot{n % 7} ici") for n in range(60)]
ENGLISH = "".join(f"{source}\n" for source, _ in PAIRS).encode()
FRENCH = "".join(f"{target}\n" for _, target in PAIRS).encode()
TSV = b"en\tfr\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS).encode()
CSV = TSV.replace(b"\t", b",")
JSON = "".join(json.dumps({"en": source, "fr": target}) + "\n" for source, target in PAIRS).encode()


def parquet(source: list[Any]) -> bytes:
    file = io.BytesIO()
    datasets.Dataset.from_dict({"en": source, "fr": [target for _, target in PAIRS]}).to_parquet(file)
    return file.getvalue()


PARQUET = parquet([source for source, _ in PAIRS])


class Case(NamedTuple):
    """A training corpus and the expected outcome."""

    name: str
    content: bytes | tuple[bytes, bytes] | None  # a table, a (source, target) pair, or None for a folder
    outcome: str | dict[str, int]  # a text of the error, or the counts of pairs kept and dropped
    file: str = "train"
    options: tuple[str, ...] = ()


def kept(count: int, **dropped: int) -> dict[str, int]:
    return {"kept": count, **dropped}


def odd(name: str, line: str | bytes, outcome: str | dict[str, int] | None = None, *options: str) -> Case:
    """Make a case with one additional line, whose translation is "x y"."""
    raw = line if isinstance(line, bytes) else line.encode()
    return Case(name, (ENGLISH + raw + b"\n", FRENCH + b"x y\n"), outcome or kept(61), options=options)


def sides(name: str, english: bytes, outcome: str | dict[str, int], *options: str, french: bytes = FRENCH) -> Case:
    return Case(name, (english, french), outcome, options=options)


def tsv(name: str, content: bytes, outcome: str | dict[str, int], file: str = "t.tsv") -> Case:
    return Case(name, content, outcome, file)


CASES = [
    odd("invalid UTF-8", b"a \xff b", "train.en, line 61: not valid UTF-8 (byte 3 of the line); convert the file"),
    odd("NUL", b"a \0 b"),
    sides("UTF-8 with a byte order mark", b"\xef\xbb\xbf" + ENGLISH, kept(60)),
    sides("UTF-16", ENGLISH.decode().encode("utf-16"), "train.en, line 1: looks like UTF-16, not UTF-8 text"),
    sides("CRLF on one side", ENGLISH.replace(b"\n", b"\r\n"), kept(60)),
    odd("other line ends", "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"),
    odd("Unicode spaces alone", "\u3000\xa0\u2003\u2028 \t", kept(60, empty=1)),
    odd("nothing to be seen", "\ufeff\x01\x7f", kept(60, empty=1)),
    odd("a megabyte without spaces", "a" * 1_000_000, kept(60, too_long=1)),
    sides("a line too many", ENGLISH + b"a\n", "train.en has 61 lines, but"),
    tsv("TSV with a column too few", TSV + b"a\n", "t.tsv, line 62: has 1 column, but line 1 has 2"),
    tsv("TSV with CR for line ends", b"en\tfr\ra\tb\r", "t.tsv, line 1: has carriage returns within; convert the line"),
    tsv("TSV with lone CR, NUL and U+2028", TSV + "a\rb\0\u2028c\x85\td\n".encode(), kept(61)),
    tsv("CSV with an open quote", CSV + b'"a,b\nc,d\n', "t.csv, line 62: cannot be read as a table", "t.csv"),
    tsv("CSV with a line end in a cell", CSV + b'"a\nb",c\n', kept(61), "t.csv"),
    tsv("CSV with semicolons", b"en;fr\na;b\n", "line 1: has one column, but cells are separated by commas", "t.csv"),
    tsv("JSON over several lines", b'{\n"data": [\n{"en": "a"}]}\n', "one object per line, or one array", "t.jsonl"),
    tsv("JSON null", JSON + b'{"en": null, "fr": "b"}\n', kept(60, empty=1), "t.jsonl"),
    tsv("JSON without a key", JSON + b'{"en": "a"}\n', "t.jsonl, line 61: no column 'fr' (there are: en)", "t.jsonl"),
    tsv(
        "JSON lone surrogate", JSON + b'{"en": "\\ud800", "fr": "b"}\n', "line 61: column 'en' holds half of", "t.jsonl"
    ),
    tsv("Parquet cut short", PARQUET[: len(PARQUET) // 2], "t.parquet: cannot be read as a table", "t.parquet"),
    tsv("Parquet with nulls", parquet([None] * 30 + ["a b"] * 30), kept(30, empty=30), "t.parquet"),
    tsv("gzip cut short", gzip.compress(TSV)[:-20], "t.tsv.gz, after line ", "t.tsv.gz"),
    Case("folder for a table", None, "t.tsv: is a folder, but not a saved dataset; for plain text give", "t.tsv"),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "valid.en").write_bytes(ENGLISH)
    (tmp_path / "valid.fr").write_bytes(FRENCH)
    return tmp_path


def settings(home: Path, *options: str) -> list[str]:
    files = [f"data.{key}={home}/{name}" for key, name in (("validation", "valid"), ("cache_dir", "cache"))]
    return ["data=files", "data.target_lang=fr", *files, "tokenizer.vocab_size=90", *options]


def made(home: Path, *options: str) -> PreparedCorpus:
    """Prepare the corpus. Its folder is inserted after composing, so that composed values can be cached."""
    values = values_of("train", settings(Path("HOME"), *(option.replace(str(home), "HOME") for option in options)))
    for key in ("train", "validation", "cache_dir"):
        values["data"][key] = values["data"][key].replace("HOME", str(home))
    config = validated(TrainConfig, values)
    return prepare(config.data, config.tokenizer)


def written(home: Path, case: Case) -> str:
    """Write the corpus of a case, and return the option that names it."""
    path = home / case.file
    if isinstance(case.content, tuple):
        for lang, content in zip(("en", "fr"), case.content, strict=True):
            path.with_name(f"{path.name}.{lang}").write_bytes(content)
    elif case.content is not None:
        path.write_bytes(case.content)
    else:
        path.mkdir()
    return f"data.train={path}"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_corpus_is_read_right_or_refused(case: Case, home: Path) -> None:
    options = [written(home, case), *case.options]
    if isinstance(case.outcome, str):
        with pytest.raises(UserError) as error:
            made(home, *options)
        assert case.outcome in str(error.value)
        assert "\n" not in str(error.value)
        assert {path.suffix for path in (home / "cache").glob("*")} <= {".lock"}
        return
    prepared = made(home, *options)
    train, report = prepared.splits["train"], prepared.report["splits"]["train"]
    assert {"kept": report["kept"], **report["dropped"]} == case.outcome
    lines = [(train.source.line(i), train.target.line(i)) for i in range(len(train))]
    if len(lines) >= len(PAIRS):
        assert lines[: len(PAIRS)] == PAIRS
    for side, tokenizer in zip((train.source, train.target), prepared.tokenizers, strict=True):
        assert tokenizer.encode(side.lines()) == [side.ids(i).tolist() for i in range(len(side))]


def test_held_out_text_in_train_is_told_in_the_case_that_the_model_sees(home: Path) -> None:
    new = [(f"a quarter of {n} houses here", f"le quart de {n} maisons ici") for n in range(100, 120)]
    upper = tuple(text.upper() for text in PAIRS[7])
    held_out = [*new, upper, (PAIRS[8][0], "autre"), (PAIRS[9][0], "autre"), ("", "")]
    for name, pairs in (("train", PAIRS), ("valid", held_out)):
        for side, lang in enumerate(("en", "fr")):
            (home / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    for lowercase, expected in (("false", (2, 0)), ("true", (3, 1))):
        prepared = made(home, f"data.train={home}/train", f"tokenizer.lowercase={lowercase}")
        report = prepared.report["splits"]["validation"]
        assert (report["sources_in_train"], report["pairs_in_train"]) == expected
    no_source, no_reference, source, pair = prepared.report["warnings"]
    assert no_source.endswith(f"nothing is translated there, such as {home}/valid.en, line 24")
    assert no_reference.startswith("validation: 1 of 24 pairs have no reference text; no translation")
    assert source.endswith(
        f"3 of 24 pairs have a source that is also in train, such as {home}/valid.en, lines 21, 22, 23"
    )
    assert pair == f"validation: 1 of 24 pairs are also in train, such as {home}/valid.en, line 21"
