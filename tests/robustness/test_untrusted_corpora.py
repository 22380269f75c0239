"""Prepared corpora from elsewhere: arrays, reports and texts that are not what they should be."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.data.prepare import fingerprint_of, prepare
from nmt.data.prepared import Prepared, write_checksums


def config_of(*overrides: str) -> schema.TrainConfig:
    from conftest import TINY, values_of

    return validated(
        schema.TrainConfig, values_of("train", [*TINY, "data.validation_size=20", "data.test_size=20", *overrides])
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    config = config_of(f"data.cache_dir={tmp_path / 'cache'}")
    directory = prepare(config.data, config.tokenizer).directory
    Prepared(directory)
    return directory


def _array(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Path], object]:  # type: ignore[type-arg]
    def poison(directory: Path) -> None:
        np.save(directory / name, change(np.load(directory / name)))

    return poison


def _set(array: "np.ndarray[object, np.dtype[np.int64]]", index: int, value: int) -> object:
    array[index] = value
    return array


def _ids(index: int, value: int) -> Callable[[Path], object]:
    def poison(directory: Path) -> None:
        ids = np.memmap(directory / "train.target.ids", "<i4", "r+")
        ids[index] = value
        ids.flush()

    return poison


def _report(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def poison(directory: Path) -> None:
        report = json.loads((directory / "report.json").read_text())
        change(report)
        (directory / "report.json").write_text(json.dumps(report))

    return poison


OFFSETS, LINES = "train.source.offsets.npy", "train.source.lines.npy"
POISONS: dict[str, Callable[[Path], object]] = {
    "negative offsets": _array(OFFSETS, lambda array: _set(array, 1, -5)),
    "decreasing offsets": _array(OFFSETS, lambda array: _set(array, 5, int(array[3]))),
    "offsets beyond the end": _array(OFFSETS, lambda array: _set(array, 5, 10**12)),
    "offsets that begin later": _array(OFFSETS, lambda array: _set(array, 0, 1)),
    "no offsets": _array(OFFSETS, lambda array: array[:0]),
    "a table of offsets": _array(OFFSETS, lambda array: array[None]),
    "fractions for offsets": _array(OFFSETS, lambda array: array.astype(np.float64)),
    "objects for offsets": _array(OFFSETS, lambda array: array.astype(object)),
    "lines that end before they begin": _array(LINES, lambda array: _set(array, 5, 0)),
    "fewer lines": _array(LINES, lambda array: array[1:]),
    "a side that is shorter": _array("test.source.offsets.npy", lambda array: np.delete(array, 3)),
    "an archive for an array": lambda at: np.savez((at / OFFSETS).open("wb"), a=np.zeros(1)),
    "a larger shape than the file": lambda at: (at / OFFSETS).write_bytes(
        re.sub(rb"'shape': \(\d", rb"'shape': (9", (at / OFFSETS).read_bytes())
    ),
    "a token beyond the vocabulary": _ids(7, 10**6),
    "a negative token": _ids(-1, -1),
    "a split outside": _report(lambda report: report["splits"].update({"../../x": report["splits"]["test"]})),  # type: ignore[attr-defined]
    "no training split": _report(lambda report: report["splits"].pop("train")),  # type: ignore[attr-defined]
    "a word for lowercase": _report(lambda report: report.update(lowercase="yes")),
    "no content": _report(lambda report: report.pop("content")),
    "numbers for dropped": _report(lambda report: report["splits"]["train"].update(dropped=3)),  # type: ignore[index]
    "deep nesting": lambda at: (at / "report.json").write_text("[" * 10_000),
    "a link outside": lambda at: (at / "x").symlink_to("/etc/passwd"),
    "a pipe": lambda at: os.mkfifo(at / "x"),
    "no tokenizer": lambda at: (at / "tokenizer.model").unlink(),
}


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_corpus_is_refused_before_it_is_used(name: str, corpus: Path) -> None:
    POISONS[name](corpus)
    with pytest.raises(UserError) as error:
        Prepared(corpus)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["0-0\n", "0:0\n" * 20, "9" * 9 + "\n", "\udcff"])
def test_poisoned_alignments_are_told(text: str, corpus: Path) -> None:
    (corpus / "test.alignments").write_bytes(text.encode(errors="surrogateescape"))
    write_checksums(corpus)
    with pytest.raises(UserError, match=r"test\.alignments(: has \d lines for 20 pairs|, line 1: is invalid)"):
        _ = [*(Prepared(corpus).splits["test"].alignments or [])]


@pytest.mark.parametrize("byte", [b"\n", b"\xff"])
def test_poisoned_text_is_told(byte: bytes, corpus: Path) -> None:
    path = corpus / "test.source.txt"
    path.write_bytes(byte + path.read_bytes()[1:])
    write_checksums(corpus)
    with pytest.raises(UserError, match=r"test\.source: sentence 1 is not one line of valid UTF-8"):
        Prepared(corpus).splits["test"].source.lines()


def test_the_lock_of_a_preparation_follows_no_link(tmp_path: Path) -> None:
    config = config_of(f"data.cache_dir={tmp_path / 'cache'}")
    (tmp_path / "cache").mkdir()
    (tmp_path / "kept").write_text("kept")
    name = fingerprint_of(config.data, config.tokenizer)[:24]
    (tmp_path / "cache" / f".{name}.lock").symlink_to(tmp_path / "kept")
    with pytest.raises((UserError, OSError)):
        prepare(config.data, config.tokenizer)
    assert (tmp_path / "kept").read_text() == "kept"
