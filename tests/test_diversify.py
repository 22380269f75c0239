"""Data diversification: whose translations the student learns, and that nothing is done twice."""

import argparse
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import yaml
from conftest import TINY, script, values_of
from forks import call_text

from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.data.demo import corpus as demo

SCRIPT = Path(__file__).parents[1] / "scripts" / "diversify.py"
SHORT = [value for value in TINY if not value.startswith("data.")]
pytestmark = pytest.mark.system


def diversify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call_text(SCRIPT, *words, cwd=folder)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.slow
def test_a_student_learns_what_both_directions_made(tmp_path: Path) -> None:
    for name, pairs in zip(("train", "valid"), demo.generate(150, 10, 1, 5), strict=False):
        for side, lang in enumerate(("en", "fr")):
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    corpus = ["data=files", "data.train=train", "data.validation=valid", "data.target_lang=fr"]
    words = ["out", *corpus, *SHORT, "tokenizer.vocab_size=250", "training.max_steps=3", "data.cache_dir=cache"]
    words += ["search.max_length=8"]
    student = ["--student", "training.max_steps=4"]
    done = diversify(tmp_path, *words, *student)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    texts = [lines(tmp_path / f"train.{lang}") for lang in ("en", "fr")]
    made = list(zip(*(lines(out / "translations" / f"train.{lang}") for lang in ("en", "fr")), strict=True))
    forward, backward = (lines(out / name / "1.translations") for name in ("forward", "backward"))
    expected = [*zip(texts[0], forward, strict=True), *zip(backward, texts[1], strict=True)]
    assert made == [pair for pair in dict.fromkeys(expected) if all(pair) and pair not in zip(*texts, strict=True)]
    assert len(made) > 100
    assert max(len(line.split()) for line in forward) <= 8  # the recipe's search
    assert json.loads((out / "diversify.json").read_text())["search"] == ["search.beam_size=5"]
    configs = {name: (out / name / "config.yaml").read_text() for name in ("forward/1", "backward/1", "student")}
    corpora = [yaml.safe_load(configs[name])["data"] for name in ("forward/1", "backward/1")]
    told = [tuple(corpus[key] for key in ("source_lang", "target_lang", "extra")) for corpus in corpora]
    assert told == [("en", "fr", []), ("fr", "en", [])]
    assert f"extra:\n  - {out / 'translations' / 'train'}\n" in configs["student"]
    assert "vocab_size: 6000\n" in configs["student"]  # the size of the others, small
    assert "max_steps: 4" in configs["student"]
    assert (out / "comparison" / "index.html").is_file()
    before = {path: path.read_bytes() for path in out.glob("**/metrics.jsonl")}
    assert len(before) == 3
    times = {path: path.stat().st_mtime_ns for path in out.glob("*/*.translations")}
    other = diversify(tmp_path, *words, "--student", "training.max_steps=5")
    assert other.returncode == 2
    assert (
        "out/student: is of another student, of the values 'training.max_steps=4' and the students before it; move all"
        in other.stderr
    )
    another = diversify(tmp_path, *words, *student, "--student", "training.max_steps=1 data.extra=[valid]")
    assert another.returncode == 0, another.stderr
    assert "student-2" in (out / "comparison" / "comparison.md").read_text()
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {path: path.stat().st_mtime_ns for path in times} == times
    more = list(zip(*(lines(out / "translations-2" / f"train.{lang}") for lang in ("en", "fr")), strict=True))
    expected += zip(texts[0], lines(out / "student.translations"), strict=True)
    assert more == [pair for pair in dict.fromkeys(expected) if all(pair) and pair not in zip(*texts, strict=True)]
    assert len(more) > len(made)
    config = (out / "student-2" / "config.yaml").read_text()
    assert f"extra:\n  - {tmp_path / 'valid'}\n  - {out / 'translations-2' / 'train'}\n" in config
    assert "max_steps: 1\n" in config
    (tmp_path / "away").mkdir()
    for path in out.glob("student*"):
        path.rename(tmp_path / "away" / path.name)
    moved = diversify(tmp_path, *words, "--student", "training.max_steps=2")
    assert moved.returncode == 0, moved.stderr
    assert "max_steps: 2\n" in (out / "student" / "config.yaml").read_text()
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert all(path.read_bytes() == content for path, content in before.items() if path.parent != out / "student")


def test_a_folder_keeps_to_what_was_begun_there(tmp_path: Path) -> None:
    begin, asked = script("diversify").begin, {"overrides": ["data=files"], "models": 1, "search": []}
    first, second, other = ["seed=1"], ["seed=2"], ["seed=3"]

    def refused(students: list[list[str]], what: str, **changed: Any) -> None:  # noqa: ANN401
        before = (tmp_path / "diversify.json").read_bytes()
        with pytest.raises(UserError, match=what):
            begin(tmp_path, {**asked, **changed}, students)
        assert (tmp_path / "diversify.json").read_bytes() == before

    begin(tmp_path, {**asked}, [first])
    refused([first], "was started with other values", models=2)
    begin(tmp_path, {**asked}, [other, second])  # none has begun
    (tmp_path / "student").mkdir()
    (tmp_path / "student-2").mkdir()
    begin(tmp_path, {**asked}, [other])
    refused(
        [first],
        "student: is of another student, of the values 'seed=3' and the students before it; move all .*/student. away$",
    )
    refused([other, first], "student-2: is of another student, of the values 'seed=2'")
    (tmp_path / "student").rmdir()
    refused([other], "student-2: is of another student")
    (tmp_path / "student-2").rmdir()
    (tmp_path / "student.translations").touch()
    refused([first], "student.translations: is of another student")
    (tmp_path / "student.translations").unlink()
    begin(tmp_path, {**asked}, [first])
    (tmp_path / "diversify.json").write_text("[]")
    refused([first], "diversify.json: is not a JSON object$")


def test_a_translation_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, bar = script("diversify"), SimpleNamespace(write=lambda _: None)
    monkeypatch.setattr(module, "PIECE", 2)
    given: list[bytes] = []

    def upper(*_: Any, input: bytes, **__: Any) -> Any:  # noqa: ANN401
        given.append(input)
        return SimpleNamespace(returncode=int(len(given) == 2), stdout=input.upper(), stderr=b"no room")

    monkeypatch.setattr(module.subprocess, "run", upper)
    with pytest.raises(UserError, match="no room"):
        module.translated(tmp_path / "1", list("abcde"), [], bar)
    assert module.translated(tmp_path / "1", list("abcde"), [], bar) == list("ABCDE")
    assert given == [b"a\nb\n", b"c\nd\n", b"c\nd\n", b"e\n"]
    assert [path.name for path in tmp_path.iterdir()] == ["1.translations"]
    assert module.translated(tmp_path / "1", list("abcde"), [], bar) == list("ABCDE")
    assert len(given) == 4


class Bar:
    """Of progress: what is written on it."""

    def __init__(self, **_: Any) -> None:  # noqa: ANN401
        self.lines: list[str] = []
        self.told = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self) -> None:
        pass

    def write(self, line: str) -> None:
        self.lines.append(line)
        self.told.set()


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    """Of a small corpus."""
    for name in ("train", "valid"):
        for lang in ("en", "de"):
            (tmp_path / f"{name}.{lang}").write_text(f"{lang} 1\n{lang} 2\n")
    corpus = ["data=files", f"data.train={tmp_path / 'train'}", f"data.validation={tmp_path / 'valid'}"]
    return argparse.Namespace(directory=tmp_path / "out", overrides=corpus, models=1, jobs=2, student=None, search=None)


def test_a_failure_is_told_while_others_go_on(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    module, bar, ended = script("diversify"), Bar(), []
    options.models = 2

    def finish(run: Path, _: list[str]) -> None:
        if run.name == "2":
            raise UserError(f"{run}: failed")
        ended.append((run.parent.name, bar.told.wait(10)))

    monkeypatch.setattr(module, "finish", finish)
    monkeypatch.setattr(module, "tqdm", lambda **_: bar)
    monkeypatch.setattr(module, "translated", lambda run, text, *_: text)
    with pytest.raises(UserError, match="forward/2: failed"):
        module.diversify(options)
    assert ended == [("forward", True)]  # nothing is begun after it
    assert bar.lines == [f"{options.directory}/forward/2: failed; runs that have started continue"]


def test_a_student_that_is_interrupted_is_waited_for(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, saved = script("diversify"), []

    def finish(run: Path, _: list[str]) -> None:
        path = run / "manifest.json"
        path.parent.mkdir(parents=True)
        path.write_text('{"starts": [{"choices": {"size": "small"}}]}')
        if run.name == "student":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            saved.append(run)

    monkeypatch.setattr(module, "finish", finish)
    monkeypatch.setattr(module, "tqdm", Bar)
    monkeypatch.setattr(module, "translated", lambda run, text, *_: [f"{run} {line}" for line in text])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            module.diversify(options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert saved == [options.directory / "student"]


FILES = ["data=files", "data.train=a", "data.validation=b"]
TWO_TOKENIZERS = [
    "tokenizer=file",
    "tokenizer.source_model=s",
    "tokenizer.target_model=t",
    "embedding.tie_source_target=false",
]


@pytest.mark.parametrize(
    ("overrides", "turned"),
    [
        (FILES, ["source_lang=de", "target_lang=en", "source_column=null", "target_column=null"]),
        (
            [*FILES, "data.source_column='in (en)'"],
            ["source_lang=de", "target_lang=en", "source_column=null", "target_column='in (en)'"],
        ),
        (
            ["data=hub", "data.id=x"],
            ["source_lang=de", "target_lang=en", "source_column=translation.de", "target_column=translation.en"],
        ),
        (
            [*FILES, *TWO_TOKENIZERS],
            ["source_lang=de", "target_lang=en", "source_column=null", "target_column=null"],
        ),
    ],
)
def test_backwards_both_sides_are_exchanged(overrides: list[str], turned: list[str]) -> None:
    values = values_of("train", overrides)
    found = script("diversify").backwards(validated(schema.TrainConfig, values))
    tokenizers = ["tokenizer.source_model=t", "tokenizer.target_model=s"] if "tokenizer=file" in overrides else []
    assert found == [*(f"data.{word}" for word in turned), *tokenizers]
    again = values_of("train", [*overrides, *found])["data"]
    for one, two in (("source_lang", "target_lang"), ("source_column", "target_column")):
        assert (again[one], again[two]) == (values["data"][two], values["data"][one])


def test_backwards_values_of_one_side_change_sides() -> None:
    given = [*FILES, "embedding.pretrained=[a,null]", "tokenizer.sampling=0.1", "tokenizer.sampling_sides=source"]
    found = script("diversify").backwards(validated(schema.TrainConfig, values_of("train", given)))
    assert found[-2:] == ["embedding.pretrained=[null,a]", "tokenizer.sampling_sides=target"]


@pytest.mark.parametrize(
    ("word", "told"), [("data.alignments=a", "data.alignments: would be"), ("data.target_lang=en", "are both en")]
)
def test_what_has_one_direction_is_refused(word: str, told: str) -> None:
    columns = ["data.source_column=x", "data.target_column=y"]
    with pytest.raises(UserError, match=told):
        script("diversify").backwards(validated(schema.TrainConfig, values_of("train", [*FILES, *columns, word])))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["out", "seed=1"], "data=demo: has one direction only"),
        (
            ["out", "data=multilingual", "data.corpora=[a-b,b-a]", *FILES[1:]],
            "data=multilingual: has several directions",
        ),
        (["out", "sead=1"], "error: sead: unknown key; did you mean"),
        (["out", *FILES, "--student", "training.max_epochs=seven"], "training.max_epochs=seven: input should be"),
        (["out", *FILES, "--student", "a='b"], 'error: --student "a=\'b": no closing quotation'),
        (["out", *FILES, "--search", "'"], 'error: --search "\'": no closing quotation'),
        (["out", *FILES, "--search", "search.beamsize=5"], "search.beamsize: unknown key; did you mean"),
        (["out", *FILES, "--search", "search.beam_size=0"], "search.beam_size=0: input should be"),
        (["out", *FILES, "seed=1,2"], "seed=1,2: several values need a sweep"),
        (["out", "seed=1", "--models", "0"], "--models and --jobs must be at least 1"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, tmp_path: Path) -> None:
    done = diversify(tmp_path, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())
