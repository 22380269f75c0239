"""Large corpora: worker processes change nothing, a killed preparation is continued, checks are remembered."""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import values_of
from forks import forked

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data import corpus as corpus_module
from nmt.data import encoding, first_pass
from nmt.data import prepare as module
from nmt.data import prepared as prepared_module
from nmt.data.encoding import JOURNAL, EncodedSplit, read_journal
from nmt.data.first_pass import FIRST_PASS
from nmt.data.prepare import fingerprint_of, prepare
from nmt.data.prepared import Prepared
from nmt.system.files import is_locked

PAIRS = 400


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text in eight chunks, with pairs to drop in each; workers start with the third one."""
    monkeypatch.setattr(corpus_module, "CHUNK", 50)
    monkeypatch.setattr(first_pass, "IN_MAIN", 2)
    monkeypatch.setattr(encoding, "IN_MAIN", 2)
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 6))) for _ in range(300)]
    for name, count in (("train", PAIRS), ("valid", 120)):
        lines = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count)]
        if name == "train":
            lines[::17] = ["" for _ in lines[::17]]
            lines[3::50] = ["long " * 60 for _ in lines[3::50]]
            lines[5::60] = [lines[5] for _ in lines[5::60]]
        for language in ("en", "de"):
            text = "".join(f"{line}\n" for line in lines)
            (tmp_path / f"{name}.{language}").write_text(text if language == "en" else text.upper())
    return tmp_path


def config(corpus: Path, *overrides: str) -> TrainConfig:
    files = [f"data.train={corpus}/train", f"data.validation={corpus}/valid", f"data.cache_dir={corpus}/cache"]
    settings = ["data=files", *files, "tokenizer.vocab_size=150", "data.max_length=40", *overrides]
    return validated(TrainConfig, values_of("train", settings))


def make(corpus: Path, *overrides: str) -> Prepared:
    settings = config(corpus, *overrides)
    return prepare(settings.data, settings.tokenizer)


def working_directory(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.part")


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


SEPARATE = ("tokenizer.joint=false", "embedding.tie_source_target=false", "tokenizer.max_train_lines=100")


@pytest.mark.parametrize("options", [(), pytest.param(SEPARATE, marks=pytest.mark.slow)])
def test_files_are_the_same_for_any_number_of_workers(options: tuple[str, ...], corpus: Path) -> None:
    whole = []
    for workers in ("1", "2", "3", "null"):
        directory = make(corpus, f"data.workers={workers}", *options).directory
        whole.append(content(directory))
        shutil.rmtree(directory)
    assert whole[0] == whole[1] == whole[2] == whole[3]


def test_chunks_change_nothing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(corpus).directory
    before = content(directory)
    shutil.rmtree(directory)
    monkeypatch.setattr(corpus_module, "CHUNK", 10_000)
    assert content(make(corpus).directory) == before


def test_fewer_lines_train_another_tokenizer(corpus: Path) -> None:
    few, all_lines = make(corpus, "tokenizer.max_train_lines=100"), make(corpus)
    assert few.tokenizers.source.model != all_lines.tokenizers.source.model
    assert make(corpus, "tokenizer.max_train_lines=100000").tokenizers.source.model == all_lines.tokenizers.source.model


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_name_the_line_also_in_a_worker(workers: int, corpus: Path) -> None:
    lines = (corpus / "train.de").read_bytes().split(b"\n")
    lines[320] = b"\xff"
    (corpus / "train.de").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"^.*train\.de, line 321: not valid UTF-8 .*data\.invalid_utf8=drop$"):
        make(corpus, f"data.workers={workers}")
    assert list((corpus / "cache").iterdir()) == []


def killed_after(chunks: int, corpus: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals) -> None:
    """Kill a preparation once so many chunks of the training set are encoded."""
    real = EncodedSplit.encode

    def encode(self: EncodedSplit, *args: Any) -> Iterator[Any]:  # noqa: ANN401
        for chunk in real(self, *args):
            if self.name == "train" and len(self.entries) == chunks:
                os.kill(os.getpid(), sign)
            yield chunk

    def work() -> int:
        monkeypatch.setattr(EncodedSplit, "encode", encode)
        make(corpus, "data.workers=2")
        return 0

    _, status = os.waitpid(forked(work, corpus / "output"), 0)
    assert status != 0


@pytest.mark.parametrize(
    ("chunks", "sign"),
    [
        *[(0, signal.SIGINT), (5, signal.SIGKILL)],
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGINT), (5, signal.SIGINT)]
        ),
    ],
)
def test_a_killed_preparation_is_continued(
    chunks: int, sign: signal.Signals, corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make(corpus).directory
    whole = content(directory)
    shutil.rmtree(directory)
    killed_after(chunks, corpus, monkeypatch, sign)
    working = working_directory(directory)
    assert len(read_journal(working)["train"]) == chunks
    for path in working.glob("train.source.*"):  # written, but not in the journal
        with path.open("ab") as file:
            file.write(b"half")
    with (working / JOURNAL).open("a") as file:
        file.write('{"split": "tr')
    encoded = []
    real = encoding.Encoder.__call__
    monkeypatch.setattr(encoding.Encoder, "__call__", lambda self, chunk: encoded.append(chunk) or real(self, chunk))
    monkeypatch.setattr(module, "read_corpus", lambda *_: pytest.fail("read again"))
    caplog.set_level("INFO")
    assert content(make(corpus, "data.workers=1").directory) == whole
    assert len(encoded) == 8 - chunks + 3  # of training and of validation
    assert any("continues a preparation" in record.message for record in caplog.records)
    assert [path.name for path in (corpus / "cache").iterdir()] == [directory.name]


def test_damaged_parts_are_encoded_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(corpus).directory
    whole = content(directory)
    shutil.rmtree(directory)
    killed_after(5, corpus, monkeypatch, signal.SIGKILL)
    path = working_directory(directory) / "train.target.ids"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert content(make(corpus).directory) == whole


def test_a_killed_reading_starts_again(corpus: Path) -> None:
    settings = config(corpus)
    directory = corpus / "cache" / fingerprint_of(settings.data, settings.tokenizer)[:24]
    working = working_directory(directory)
    working.mkdir(parents=True)
    (working / "train.raw").write_text("half a ")
    (working / "sample.source").write_text("old\n")
    assert len(make(corpus).splits["train"]) > 300
    assert [path.name for path in (corpus / "cache").iterdir()] == [directory.name]


def test_an_interrupted_reading_leaves_nothing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "read_corpus", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(corpus)
    assert list((corpus / "cache").iterdir()) == []


def test_others_leftovers_are_kept_for_a_week(corpus: Path) -> None:
    (corpus / "cache").mkdir()
    for name, days in (("recent", 6), ("old", 8)):
        working = corpus / "cache" / f".{name}.part"
        working.mkdir()
        (working / FIRST_PASS).write_text("{}")
        os.utime(working, (time.time() - days * 24 * 3600,) * 2)
    directory = make(corpus).directory
    assert {path.name for path in (corpus / "cache").iterdir()} == {directory.name, ".recent.part"}


def test_a_leftover_is_removed_under_its_lock_unless_it_is_gone(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = corpus / "cache"
    folder.mkdir()
    (folder / ".old.part").mkdir()
    (folder / ".gone.part").symlink_to("nowhere")  # as if its owner had finished it meanwhile
    (folder / ".busy.part").mkdir()
    removed = []

    def remove(path: Path, **_: object) -> None:
        removed.append((path.name, is_locked(path.with_name(".old.lock"))))

    monkeypatch.setattr(shutil, "rmtree", remove)
    with module._locked(folder / ".busy.lock"):
        module._remove_stale_preparations(folder / "own")
    assert removed == [(".old.part", True)]
    assert not list(folder.glob("*.lock"))


@pytest.fixture
def everything_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "LARGE", 0)


@pytest.mark.usefixtures("everything_large")
def test_a_large_corpus_is_checked_once_per_state_of_its_files(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    real = prepared_module._check_sums
    monkeypatch.setattr(prepared_module, "_check_sums", lambda path: checked.append(path) or real(path))
    directory = make(corpus).directory
    time.sleep(2 * prepared_module.RECENT)
    Prepared(directory)
    before = len(checked)
    Prepared(directory)
    assert len(checked) == before
    path = directory / "train.source.ids"
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[0:4] = (10**6).to_bytes(4, "little")
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had happened
    time.sleep(2 * prepared_module.RECENT)
    with pytest.raises(UserError, match="has token ids that are not in the tokenizer's vocabulary"):
        Prepared(directory)
    elsewhere = corpus / "elsewhere"
    shutil.copytree(corpus / "cache", elsewhere, copy_function=shutil.copy2)
    with pytest.raises(UserError):
        Prepared(elsewhere / directory.name)


@pytest.mark.usefixtures("everything_large")
def test_digests_are_remembered_until_a_file_changes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(corpus)
    time.sleep(2 * prepared_module.RECENT)
    first = fingerprint_of(settings.data, settings.tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert fingerprint_of(settings.data, settings.tokenizer) == first
    text = (corpus / "valid.de").read_text()
    (corpus / "valid.de").write_text(text[::-1])
    assert fingerprint_of(settings.data, settings.tokenizer) != first
    with contextlib.suppress(FileNotFoundError):
        (corpus / "cache" / f".states.{os.getuid()}.json").write_text("{")
    assert fingerprint_of(settings.data, settings.tokenizer) != first
