"""Prepared corpora: their content, the pairs that are dropped and reported, and when they are prepared again."""

import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_config, values_of

from nmt.config.checks import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.config.schema.data import FileTokenizer
from nmt.data import corpus as corpus_module
from nmt.data import prepare as module
from nmt.data.prepare import fingerprint_of, prepare
from nmt.data.prepared_corpus import PreparedCorpus

PAIRS = [(f"the number {n} and word{n % 7} here", f"le nombre {n} et mot{n % 7} ici") for n in range(60)]


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    for side, language in enumerate(("en", "de")):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{name}.{language}").write_text(text, encoding="utf-8")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    odd = [("", "leer"), ("blank", "   "), ("word " * 120, "wort " * 120), ("one", "eins " * 20)]
    write(tmp_path, "train", [*PAIRS, *odd])
    write(tmp_path, "valid", [PAIRS[3], ("", ""), ("ξένος", "neu")])
    return tmp_path


def config(corpus: Path, *overrides: str) -> TrainConfig:
    """Compose the configuration, and insert the folder afterwards, so that the composed values can be cached."""
    files = ["data.train=FOLDER/train", "data.validation=FOLDER/valid", "data.cache_dir=FOLDER/cache"]
    options = [option.replace(str(corpus), "FOLDER") for option in overrides]
    size = [] if "tokenizer=sides" in overrides else ["tokenizer.vocab_size=80"]
    values = values_of("train", ["data=files", *files, *size, *options])
    return validated(TrainConfig, json.loads(json.dumps(values).replace("FOLDER", str(corpus))))


def make(corpus: Path, *overrides: str) -> PreparedCorpus:
    settings = config(corpus, *overrides)
    return prepare(settings.data, settings.tokenizer)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def in_cache(corpus: Path) -> set[str]:
    """List the names in the cache, without locks."""
    return {path.name for path in (corpus / "cache").iterdir() if path.suffix != ".lock"}


# The content of a prepared corpus


def test_lines_and_ids_belong_together(corpus: Path) -> None:
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
    assert report["validation"]["unknown_rate"][0] > 0
    assert report["train"]["unknown_rate"] == [0, 0]
    assert report["train"]["longest"][0] <= 100


def test_a_pair_of_max_length_tokens_is_kept(corpus: Path) -> None:
    longest = max(make(corpus).report["splits"]["train"]["longest"])
    for max_length, dropped in ((longest, 0), (longest - 1, 1)):
        report = make(corpus, f"data.max_length={max_length}").report["splits"]["train"]
        assert report["dropped"].get("too_long", 0) == dropped


def test_word_alignments_are_read_by_index(corpus: Path) -> None:
    lines = ["0-0 1-1", "", *["1-1"] * (len(PAIRS) - 2)]
    write(corpus, "plain", PAIRS)
    (corpus / "plain.align").write_text("".join(f"{line}\n" for line in lines))
    prepared = make(corpus, f"data.train={corpus}/plain", "data.alignments=align")
    alignments = prepared.splits["train"].alignments
    assert alignments is not None
    assert list(alignments) == lines == [alignments[i] for i in range(len(alignments))]
    assert prepared.splits["validation"].alignments is None


# When a corpus is prepared again


def test_a_second_start_only_opens(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(corpus)
    monkeypatch.setattr(module, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert make(corpus).directory == first.directory
    assert make(corpus, "tokenizer.sampling=0.1").directory == first.directory  # training draws segmentations
    moved = corpus.parent / "moved"
    shutil.copytree(corpus, moved, ignore=shutil.ignore_patterns("cache"))
    assert make(moved, f"data.cache_dir={corpus}/cache").directory == first.directory


def test_settings_and_text_decide_whether_a_corpus_is_another(corpus: Path) -> None:
    """Paths do not matter."""
    write(corpus, "one", [("eins", "ein Wort mehr")])
    for name in ("two", "three"):
        for language in ("en", "de"):
            shutil.copyfile(corpus / f"one.{language}", corpus / f"{name}.{language}")
    one, two, three, valid = (f"{corpus}/{name}" for name in ("one", "two", "three", "valid"))
    settings = config(corpus)

    def fingerprint(data: dict[str, Any], tokenizer: dict[str, Any]) -> str:
        return fingerprint_of(settings.data.model_copy(update=data), settings.tokenizer.model_copy(update=tokenizer))

    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"vocab_size": 70}),
        ({}, {"kind": "char"}),
        ({}, {"lowercase": True}),
        ({"max_length": 50}, {}),
        ({"source_lang": "de", "target_lang": "en"}, {}),
        ({"extra": [one]}, {}),
        ({"extra": [one, two]}, {}),
        ({"validation": [one, valid]}, {}),
        ({"validation": [one], "test": [valid]}, {}),
    ]
    fingerprints = [fingerprint(*variant) for variant in variants]
    assert len(set(fingerprints)) == len(variants)
    assert fingerprint({"extra": [three]}, {}) == fingerprint({"extra": [one]}, {})
    (corpus / "valid.de").write_text("anders\n\nneu\n")
    assert fingerprint({}, {}) not in fingerprints


def test_an_existing_tokenizer_decides_by_its_model(corpus: Path) -> None:
    """The content of the model file changes the fingerprint; its kind allows sampled segmentations or not."""
    model, data = corpus / "t.model", config(corpus).data
    values = {"kind": "file", "source_model": str(model), "target_model": None, "lowercase": False}
    off, on = (FileTokenizer.model_validate({**values, "sampling": s}) for s in (0.0, 0.1))
    prepared = []
    for kind in ("bpe", "char"):
        shutil.copyfile(make(corpus, f"tokenizer.kind={kind}").directory / "tokenizer.model", model)
        prepared.append(prepare(data, off))
    assert prepared[0].fingerprint != prepared[1].fingerprint
    with pytest.raises(UserError, match=r"tokenizer\.sampling=0\.1: .*\.model is not a bpe model"):
        prepare(data, on)  # an error even though the corpus is already prepared
    assert prepare(data, off).directory == prepared[1].directory


@pytest.mark.parametrize("name", ["train.source.ids 8", "train.target.offsets 0", "report.json", "tokenizer.model"])
def test_an_incomplete_corpus_is_prepared_again(corpus: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    name, _, size = name.partition(" ")
    directory = make(corpus).directory
    whole = content(directory)
    if size:
        (directory / name).write_bytes(bytes(int(size)))
    else:
        (directory / name).unlink()
    assert make(corpus).directory == directory
    assert content(directory) == whole
    assert [record.message for record in caplog.records if "is incomplete; preparing it again" in record.message]


# The cache, when preparations fail, are killed or run at the same time


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("tokenizer.vocab_size=5000", "vocab_size"),
        ("data.max_length=1", r"filters drop all .*data\.max_length=1"),
    ],
)
def test_a_failure_leaves_nothing(option: str, message: str, corpus: Path) -> None:
    with pytest.raises(UserError, match=message):
        make(corpus, option)
    assert in_cache(corpus) == set()


def test_of_several_at_a_time_one_prepares_and_the_others_wait(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, prepared = module._prepare, []

    def slow(*args: Any) -> None:  # noqa: ANN401
        prepared.append(args)
        time.sleep(0.3)
        real(*args)

    monkeypatch.setattr(module, "_prepare", slow)
    settings = config(corpus)
    with ThreadPoolExecutor(3) as pool:  # threads lock each other out as processes do: each opens the lock file
        opened = list(pool.map(lambda _: prepare(settings.data, settings.tokenizer), range(3)))
    assert [len(one.splits["train"]) for one in opened] == [62] * 3
    assert len(prepared) == 1


# Large corpora: chunks and worker processes


@pytest.fixture
def chunked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write text of eight chunks, each with pairs to drop; worker processes start with the third chunk."""
    monkeypatch.setattr(corpus_module, "CHUNK_PAIRS", 50)
    monkeypatch.setattr(module, "READ_IN_MAIN", 2)
    monkeypatch.setattr(module, "ENCODE_IN_MAIN", 2)
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 6))) for _ in range(300)]
    for name, count in (("train", 400), ("valid", 120)):
        lines = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count)]
        if name == "train":
            lines[::17] = ["" for _ in lines[::17]]
            lines[3::50] = ["long " * 60 for _ in lines[3::50]]
        write(tmp_path, name, [(line, line.upper()) for line in lines])
    return tmp_path


SMALL = ("tokenizer.vocab_size=150", "data.max_length=40")
SIDES = ("tokenizer=sides", "tokenizer.source.vocab_size=150", "tokenizer.target.vocab_size=100", "data.max_length=40")


@pytest.mark.parametrize(
    "options", [SMALL, pytest.param((*SIDES, "tokenizer.max_train_lines=100"), marks=pytest.mark.slow)]
)
def test_neither_workers_nor_chunks_change_a_file(
    options: tuple[str, ...], chunked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    for workers, chunk in (("1", 50), ("2", 50), ("1", 10_000)):
        monkeypatch.setattr(corpus_module, "CHUNK_PAIRS", chunk)
        directory = make(chunked, f"data.workers={workers}", *options).directory
        whole.append(content(directory))
        shutil.rmtree(directory)
    assert whole[0] == whole[1] == whole[2]


def test_errors_in_a_later_chunk_name_the_line(chunked: Path) -> None:
    lines = (chunked / "train.de").read_bytes().split(b"\n")
    lines[320] = b"\xff"
    (chunked / "train.de").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"^.*train\.de, line 321: not valid UTF-8 \(byte 1 of the line\)"):
        make(chunked, "data.workers=1", *SMALL)
    assert in_cache(chunked) == set()


@pytest.mark.parametrize(("tokenizer", "total"), [("bpe", 100), ("sides", 200)])
def test_tokenizers_are_trained_on_a_fair_sample_of_lines(tokenizer: str, total: int, tmp_path: Path) -> None:
    split = module.RawSplit()
    with (tmp_path / "raw").open("wb") as file:
        for start in range(0, 400, 50):
            rows = "".join(f"s{i}\nt{i}\n\n" for i in range(start, start + 50)).encode()
            split.chunks.append(module.RawChunk(tmp_path / "raw", file.tell(), len(rows), 50))
            file.write(rows)

    def sample(lines: int) -> list[list[str]]:
        settings = run_config(f"tokenizer={tokenizer}").tokenizer
        limited = settings.model_copy(update={"max_train_lines": lines})
        return [list(lines) for lines in module.tokenizer_lines(split, limited)]

    assert sample(1000) == sample(800) == [[f"{side}{i}" for i in range(400)] for side in "st"]
    drawn = sample(100)
    numbers = [[int(line[1:]) for line in side] for side in drawn]
    assert sum(map(len, drawn)) == total
    assert numbers == [sorted({*side}) for side in numbers]
    assert numbers[0] != numbers[1]
    assert all(0.3 < sum(number < 200 for number in side) / len(side) < 0.7 for side in numbers)
    assert sample(100) == drawn
