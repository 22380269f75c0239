"""nmt-translate reads the lines that have arrived, and answers them without waiting for more."""

import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from nmt.cli.translate import PIPE_BYTES, LineReader, answer, read_buffers
from nmt.config.errors import UserError
from nmt.system.distributed import ProcessGroup


def buffers(stream: BinaryIO, most: int) -> Iterator[list[str]]:
    for buffer in read_buffers(stream, {}, most, False):
        yield [source for source, _ in buffer]


def test_lines_of_an_open_pipe_are_answered_before_the_next_one_arrives() -> None:
    end, other = os.pipe()
    with open(end, "rb") as stream:
        found = buffers(stream, 1024)
        os.write(other, b"one\ntwo\n")
        assert next(found) == ["one", "two"]
        os.write(other, b"three\nhalf of")
        assert next(found) == ["three"]
        os.write(other, b" four\r\n\n")
        assert next(found) == ["half of four", ""]
        os.write(other, b"the last without end")
        os.close(other)
        assert list(found) == [["the last without end"]]


def test_input_in_another_format_is_refused() -> None:
    for content, message in (
        ("the dog\n".encode("utf-16"), r"^input, line 1: looks like UTF-16, not UTF-8 text; convert the file$"),
        ("the dog\n".encode("utf-16-le"), r"^input, line 1: looks like UTF-16"),
        (gzip.compress(b"the dog\n"), r"^input, line 1: looks like gzip, not UTF-8 text; unpack it"),
    ):
        with pytest.raises(UserError, match=message):
            list(buffers(io.BytesIO(content), 1024))


def test_a_byte_order_mark_is_no_part_of_the_input_and_nul_is_no_other_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "input").write_bytes(b"\xef\xbb\xbfa\n\xffb\n")
    (tmp_path / "nul").write_bytes(b"\0\na\n")
    for name, lines in (("input", ["a", "\ufffdb"]), ("nul", ["\0", "a"])):
        with (tmp_path / name).open("rb") as stream:
            assert list(buffers(stream, 1024)) == [lines]
    assert "line 2: not valid UTF-8" in caplog.text


def test_lines_end_at_newlines_wherever_a_read_ends(tmp_path: Path) -> None:
    long = [b"x" * 3 * PIPE_BYTES, b"x" * PIPE_BYTES + b"\n" + b"y" * PIPE_BYTES + b"\n\n"]
    for content in (b"", b"\n", b"a", b"a\n", b"\n\na", *long):
        (tmp_path / "input").write_bytes(content)
        with (tmp_path / "input").open("rb") as stream:
            lines = b"".join(line + b"\n" for line in LineReader(stream))
        assert lines == content + b"\n" * (content[-1:] not in b"\n")


def test_of_a_file_as_many_lines_are_read_as_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("".join(f"line {number}\n" for number in range(20_000)))
    with (tmp_path / "input").open("rb") as stream:
        assert [len(buffer) for buffer in buffers(stream, 3000)] == [3000] * 6 + [2000]


class Echo:
    """Stands in for a translator: returns its input lines as translations."""

    group = ProcessGroup()

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def translate_nbest(self, lines: list[str], n: int, first_line: int) -> list[list[Any]]:
        assert first_line == sum(map(len, self.seen)) + 1
        self.seen.append(lines)
        return [[SimpleNamespace(text=line, score=0.0, word_alignment=lambda: "0-0")] * n for line in lines]


def test_translations_and_alignments_can_be_read_as_soon_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end, other = os.pipe()
    output, links = tmp_path / "out", tmp_path / "links"

    class Watching(Echo):
        """Checks that the first line's output is complete before it translates the second line."""

        def translate_nbest(self, lines: list[str], n: int, first_line: int) -> list[list[Any]]:
            if first_line == 1:
                os.write(other, b"two\n")
                os.close(other)
            else:
                assert output.read_text() == "0 ||| one ||| 0.0000\n0 ||| one ||| 0.0000\n"
                assert links.read_text() == "0 ||| 0-0\n0 ||| 0-0\n"
            return super().translate_nbest(lines, n, first_line)

    config: Any = SimpleNamespace(references=None, nbest=2)
    translator: Any = Watching()
    with open(end, "rb") as given, output.open("w") as written, links.open("wb") as aligned:
        monkeypatch.setattr("sys.stdout", written)
        os.write(other, b"one\n")
        answer(translator, config, read_buffers(given, {}, 1024, False), aligned, {})
    assert translator.seen == [["one"], ["two"]]
