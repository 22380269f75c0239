"""nmt-translate with input that is not text: it writes one line for each line, whatever the line contains."""

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import tiny_config, values_of

from nmt import Translator
from nmt.cli import translate as command
from nmt.config.checks import validated
from nmt.config.schema import TranslateConfig
from nmt.training.job import train

pytestmark = pytest.mark.system

SPELLED = ["tokenizer.byte_fallback=true", "tokenizer.vocab_size=600", "tokenizer.normalization=none"]
ODD = [
    *(b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\r", b"\r\r"),
    *(b"</s>", b"<s>", b"<unk>", b"<pad>", b"<0x0A>", b"|||", b" ||| ", b"\t", b"   ", b"\x1b", b"the cat", b"a dog"),
    *"\u2028 \u2029 \x85 \x0b \x0c \x1c \u200b \u202e \u3000 \xa0 \ufffe \uffff".encode().split(b" "),
    *"\ue000 \u2581 e\u0301\u0301 \u0e20\u0e32 \U0001f468\u200d\U0001f469 \U0001f1e9\U0001f1ea".encode().split(b" "),
]
Translate = Callable[..., list[bytes]]


@pytest.fixture(scope="module", params=[pytest.param([], marks=pytest.mark.slow), SPELLED], ids=["unknown", "spelled"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for two updates. With bytes as tokens, this model generates newlines and invalid UTF-8."""
    directory = tmp_path_factory.mktemp("bytes") / "run"
    assert train(tiny_config("training.max_steps=2", *request.param), directory) == 0
    return directory


@pytest.fixture
def translate(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Translate:
    """Return a function: translate(data, "nbest=2", ...) runs the command in this process and returns its lines."""

    def call(data: bytes, *overrides: str) -> list[bytes]:
        (tmp_path / "in").write_bytes(data)
        config = validated(TranslateConfig, values_of("translate", [f"run={run}", "threads=1", *overrides]))
        with (tmp_path / "in").open() as given, (tmp_path / "out").open("w") as written, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", given)
            patch.setattr(sys, "stdout", written)
            command.translate(config)
        output = (tmp_path / "out").read_bytes()
        assert output.endswith(b"\n") or not data
        assert "\r" not in output.decode("utf-8")
        return output.split(b"\n")[:-1]

    return call


def lines_in(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


def random_lines(seed: int, count: int, longest: int) -> bytes:
    """Generate lines of random bytes, words, symbols and invalid UTF-8; the last newline may be missing."""
    draw, text = random.Random(seed), b""
    for _ in range(count):
        size = draw.randrange(longest)
        letters = draw.randbytes(size).translate(None, b"\n").decode("latin-1").encode()
        symbols = b"".join(draw.choices(ODD, k=size // 8))
        text += draw.choice([draw.randbytes(size), letters, symbols, symbols])
        text += draw.choice([b"\n", b"\n", b"\n", b"\r\n", b"\n\n"])
    return text.removesuffix(draw.choice([b"", b"\n"]))


@pytest.mark.parametrize("search", ["search.beam_size=2", pytest.param("search=sampling", marks=pytest.mark.slow)])
def test_random_bytes_give_numbered_translations(translate: Translate, tmp_path: Path, search: str) -> None:
    data, links = random_lines(3, 40, 120), tmp_path / "links"
    options = [search, "search.max_length=20", "nbest=2", f"alignments={links}"]
    found = translate(data, *options, "buffer_lines=7")
    numbers = [int(line.split(b" ||| ")[0]) for line in found]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(lines_in(data)))
    assert all(float(line.rsplit(b" ||| ", 1)[1]) <= 0 for line in found)
    assert [int(line.split(b" ||| ")[0]) for line in links.read_bytes().split(b"\n")[:-1]] == numbers
    assert translate(data, *options) == found


def test_next_to_nothing_gives_a_line_for_each_line(translate: Translate) -> None:
    for data in (b"\n" * 300, b"\r\n" * 50, b"\0", b"\r", b"a", b"", b" \n\n\x0c", b"\xef\xbb\xbf", b"\x80"):
        assert len(translate(data)) == lines_in(data)


def test_a_lone_surrogate_of_python_is_a_broken_character(run: Path) -> None:
    translator = Translator.load(run)
    half, broken = translator.translate(["the \ud800 cat", "the \ufffd cat"])
    assert half.text == broken.text
    assert "\r" not in translator.translate(["a\rb\nc"])[0].text
