"""Prepared corpora: what they hold, what they drop and report, and when they are made anew."""

import errno
import fcntl
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import values_of

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.config.schema.data import FileTokenizer
from nmt.data import prepare as module
from nmt.data.batching import padded
from nmt.data.prepare import prepare
from nmt.data.prepared import Prepared

PAIRS = [(f"the number {n} and word{n % 7} here", f"le nombre {n} et mot{n % 7} ici") for n in range(60)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    def write(name: str, pairs: list[tuple[str, str]]) -> None:
        for lang, side in (("en", 0), ("de", 1)):
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")

    write("train", [*PAIRS, ("", "leer"), ("blank", "   "), ("word " * 120, "wort " * 120), ("one", "eins " * 20)])
    write("valid", [PAIRS[3], ("", ""), ("ξένος", "neu")])
    return tmp_path


def config(corpus: Path, *overrides: str) -> TrainConfig:
    files = [f"data.train={corpus}/train", f"data.validation={corpus}/valid", f"data.cache_dir={corpus}/cache"]
    return validated(TrainConfig, values_of("train", ["data=files", *files, "tokenizer.vocab_size=80", *overrides]))


def make(corpus: Path, *overrides: str) -> Prepared:
    settings = config(corpus, *overrides)
    return prepare(settings.data, settings.tokenizer)


def test_holds_lines_and_ids_that_belong_together(corpus: Path) -> None:
    prepared = make(corpus)
    train = prepared.splits["train"]
    assert [(train.source.line(i), train.target.line(i)) for i in range(60)] == PAIRS
    for index in range(len(train)):
        assert train.source.ids(index).tolist() == prepared.tokenizers.source.encode([train.source.line(index)])[0]
        assert train.target.ids(index)[-1] == prepared.tokenizers.target.eos
    assert train.source.lengths.sum() == len(train.source.tokens)
    assert isinstance(train.source.tokens, np.memmap)
    assert train.alignments is None


def test_training_is_filtered_and_counted_and_held_out_text_is_not(corpus: Path) -> None:
    report = make(corpus, "data.max_length=100", "data.max_ratio=3").report["splits"]
    assert report["train"]["dropped"] == {"empty": 2, "too_long": 1, "ratio": 1}
    assert (report["train"]["read"], report["train"]["kept"]) == (64, 60)
    assert (report["validation"]["read"], report["validation"]["kept"]) == (3, 3)
    assert report["validation"]["sources_in_train"] == 1
    assert report["validation"]["unknown_rate"][0] > 0
    assert report["train"]["unknown_rate"] == [0, 0]
    assert report["train"]["longest"][0] <= 100


def test_broken_lines_are_counted(corpus: Path) -> None:
    with (corpus / "train.en").open("ab") as file:
        file.write(b"\xff\n")
    with (corpus / "train.de").open("ab") as file:
        file.write(b"gut\n")
    report = make(corpus, "data.invalid_utf8=drop").report["splits"]["train"]
    assert report["dropped"]["invalid_utf8"] == 1


def test_a_second_start_does_nothing_but_open(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(corpus)
    monkeypatch.setattr(module, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert make(corpus).directory == first.directory
    assert make(corpus, "tokenizer.sampling=0.1").directory == first.directory  # drawn in training, not here
    moved = corpus.parent / "moved"
    shutil.copytree(corpus, moved, ignore=shutil.ignore_patterns("cache"))
    assert make(moved, f"data.cache_dir={corpus}/cache").directory == first.directory


def test_sampling_is_refused_also_where_the_corpus_is_prepared(corpus: Path) -> None:
    characters = make(corpus, "tokenizer=char")
    path = str(characters.directory / "tokenizer.model")
    existing = {
        "kind": "file",
        "source_model": path,
        "target_model": None,
        "lowercase": False,
        "sampling_sides": "both",
    }
    off, on = (FileTokenizer.model_validate({**existing, "sampling": sampling}) for sampling in (0.0, 0.1))
    data = config(corpus).data
    first = prepare(data, off)
    with pytest.raises(UserError, match=r"tokenizer\.sampling=0\.1: .*\.model is not a bpe or unigram model"):
        prepare(data, on)
    assert prepare(data, off).directory == first.directory


@pytest.mark.parametrize(
    "change",
    ["tokenizer.vocab_size=70", "tokenizer.kind=char", "tokenizer.lowercase=true", "data.max_length=50"],
)
def test_other_settings_make_another_corpus(corpus: Path, change: str) -> None:
    assert make(corpus).fingerprint != make(corpus, change).fingerprint


def test_other_text_makes_another_corpus(corpus: Path) -> None:
    before = make(corpus).fingerprint
    (corpus / "valid.de").write_text("anders\n\nneu\n")
    assert make(corpus).fingerprint != before


def test_more_text_makes_another_corpus_wherever_it_lies(corpus: Path, tmp_path: Path) -> None:
    before = make(corpus).fingerprint
    for name in ("one", "two"):
        for lang in ("en", "de"):
            (tmp_path / f"{name}.{lang}").write_text("ein Wort mehr\n")
    prepared = make(corpus, f"data.extra={tmp_path / 'one'}")
    assert prepared.fingerprint != before
    assert len(prepared.splits["train"]) == len(make(corpus).splits["train"]) + 1
    assert make(corpus, f"data.extra={tmp_path / 'two'}").fingerprint == prepared.fingerprint
    assert make(corpus, f"data.extra=[{tmp_path / 'one'},{tmp_path / 'two'}]").fingerprint != prepared.fingerprint


def test_a_file_that_moves_between_splits_makes_another_corpus(corpus: Path) -> None:
    for name in ("one", "two"):
        for lang in ("en", "de"):
            shutil.copyfile(corpus / f"valid.{lang}", corpus / f"{name}.{lang}")
    train, one, two, valid = (corpus / name for name in ("train", "one", "two", "valid"))
    given = [
        (f"data.train=[{train},{one}]", f"data.validation=[{two},{valid}]"),
        (f"data.train=[{train},{one},{two}]", f"data.validation={valid}"),
        (f"data.train={train}", f"data.validation=[{one},{two},{valid}]"),
        (f"data.train=[{train},{one}]", f"data.validation={two}", f"data.test={valid}"),
    ]
    assert len({make(corpus, *each).fingerprint for each in given}) == len(given)


def test_swapped_languages_make_another_corpus(corpus: Path) -> None:
    assert make(corpus).fingerprint != make(corpus, "data.source_lang=de", "data.target_lang=en").fingerprint


def test_a_failure_leaves_nothing_behind(corpus: Path) -> None:
    with pytest.raises(UserError, match="vocab_size"):
        make(corpus, "tokenizer.vocab_size=5000")
    assert list((corpus / "cache").iterdir()) == []


def test_a_corpus_appears_all_at_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no renaming today")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no renaming"):
        make(corpus)
    assert list((corpus / "cache").iterdir()) == []


def test_of_several_at_a_time_one_prepares_and_the_others_wait(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, prepared = module._prepare, []

    def slow(*args: Any) -> None:  # noqa: ANN401
        prepared.append(args)
        time.sleep(0.3)
        real(*args)

    monkeypatch.setattr(module, "_prepare", slow)
    settings = config(corpus)
    with ThreadPoolExecutor(3) as pool:  # a lock on an open file holds between threads as between processes
        found = list(pool.map(lambda _: prepare(settings.data, settings.tokenizer), range(3)))
    assert [len(each.splits["train"]) for each in found] == [62] * 3
    assert len(prepared) == 1
    assert len(list((corpus / "cache").iterdir())) == 1


def test_what_a_killed_preparation_left_is_removed(corpus: Path) -> None:
    name = make(corpus).fingerprint[:24]
    shutil.rmtree(corpus / "cache" / name)
    (corpus / "cache" / f".{name}.abc.part").mkdir()
    (corpus / "cache" / f".{name}.lock").touch()
    (corpus / "cache" / ".another.123.part").mkdir()
    make(corpus)
    assert [path.name for path in (corpus / "cache").iterdir()] == [name]


def test_what_another_process_is_preparing_is_left_alone(corpus: Path) -> None:
    (corpus / "cache").mkdir()
    working = corpus / "cache" / ".another.123.part"
    working.mkdir()
    with (corpus / "cache" / ".another.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(corpus)
        assert working.exists()


def test_a_cache_can_be_shared_as_far_as_the_umask_allows(corpus: Path) -> None:
    before = os.umask(0o027)
    try:
        directory = make(corpus).directory
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750


def test_a_cache_that_cannot_be_written_is_told_so(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:  # noqa: ANN401
        if flags & os.O_CREAT and str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=r"cache/\..*\.lock"):
        make(corpus)


def test_a_lock_of_another_user_can_be_waited_for(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def of_another_user(path: Any, flags: int, *args: Any) -> int:  # noqa: ANN401
        if flags & os.O_RDWR and str(path).endswith(".lock"):
            real(path, os.O_CREAT | os.O_WRONLY, 0o600)
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", of_another_user)
    assert len(make(corpus).splits["train"]) == 62


def truncate_ids(directory: Path) -> None:
    (directory / "train.source.ids").write_bytes(b"\0" * 8)


def drop_offsets(directory: Path) -> None:
    (directory / "train.target.offsets.npy").unlink()


def pickle_offsets(directory: Path) -> None:
    np.save(directory / "train.target.offsets.npy", np.array([{}], dtype=object), allow_pickle=True)


def zero_ids(directory: Path) -> None:
    path = directory / "train.source.ids"
    path.write_bytes(b"\0" * path.stat().st_size)


def flip_a_bit(directory: Path) -> None:
    path = directory / "tokenizer.model"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def drop_the_report(directory: Path) -> None:
    (directory / "report.json").unlink()


def drop_the_checksums(directory: Path) -> None:
    (directory / "checksums.json").unlink()


DAMAGES = [truncate_ids, drop_offsets, pickle_offsets, zero_ids, flip_a_bit, drop_the_report, drop_the_checksums]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_prepared_again(
    corpus: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    directory = make(corpus).directory
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}
    damage(directory)
    assert make(corpus).directory == directory
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == whole
    warned = [record.message for record in caplog.records if "preparing it again" in record.message]
    assert len(warned) == (damage is not drop_the_report)


def test_nothing_left_to_train_on_is_an_error(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"filters drop all .*data\.max_length=1"):
        make(corpus, "data.max_length=1")


def test_a_held_out_split_without_any_pair_is_an_error_now_and_not_after_training(corpus: Path) -> None:
    for lang in ("en", "de"):
        (corpus / f"valid.{lang}").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="none of the 1 pairs read for validation"):
        make(corpus, "data.invalid_utf8=drop")


def test_reading_back_needs_neither_datasets_nor_pyarrow(corpus: Path) -> None:
    import subprocess

    directory = make(corpus).directory
    code = (
        "import sys; from pathlib import Path; from nmt.data.prepared import Prepared;"
        f"print(len(Prepared(Path({str(directory)!r})).splits['train']),"
        "sorted({'datasets', 'pyarrow', 'torch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "62 []"


def test_the_report_is_saved_as_json(corpus: Path) -> None:
    prepared = make(corpus)
    assert json.loads((prepared.directory / "report.json").read_text()) == prepared.report


def test_padding_of_ragged_rows() -> None:
    assert padded([[1, 2, 3], [], [4]], 9).tolist() == [[1, 2, 3], [9, 9, 9], [4, 9, 9]]
    assert padded([[]], 9).shape == (1, 0)


def test_word_alignments_are_read_by_index(corpus: Path) -> None:
    lines = ["0-0 1-1", "", *["1-1"] * (len(PAIRS) - 2)]
    for name, side in (("plain.en", 0), ("plain.de", 1)):
        (corpus / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    (corpus / "plain.align").write_text("".join(f"{line}\n" for line in lines))
    prepared = make(corpus, f"data.train={corpus}/plain", "data.alignments=align")
    found = prepared.splits["train"].alignments
    assert found is not None
    assert list(found) == lines == found[:]
    assert found[1] == ""
    assert isinstance(found._text, np.memmap)  # type: ignore[attr-defined]
    assert prepared.splits["validation"].alignments is None


@pytest.mark.parametrize("name", ["train.source.offsets.npy", "train.target.ids", "train.raw"])
def test_a_full_disk_names_the_cache(name: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._prepare

    def prepare_on_a_full_disk(*args: Any) -> None:  # noqa: ANN401
        (args[-1] / name).symlink_to("/dev/full")
        real(*args)

    monkeypatch.setattr(module, "_prepare", prepare_on_a_full_disk)
    with pytest.raises(OSError, match="No space left on device") as error:
        make(corpus)
    assert error.value.filename == str(corpus / "cache")
    assert list((corpus / "cache").iterdir()) == []
