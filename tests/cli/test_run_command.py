"""Signals, errors of the system and closed output: one line at most, and the exit status."""

import errno
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from nmt.cli.run_command import run_command


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")


def call(monkeypatch: pytest.MonkeyPatch, task: object, *arguments: str, command: str = "train") -> int:
    """Run a command with `task` in place of its work, and return the exit status."""
    monkeypatch.setattr(sys, "argv", [f"nmt-{command}", *arguments])
    with pytest.raises(SystemExit) as exit_:
        run_command(command, task)  # type: ignore[arg-type]
    return int(exit_.value.code or 0)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(*_: object) -> None:
        raise KeyboardInterrupt

    assert call(monkeypatch, task) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_what_the_system_refuses_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(*_: object) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    assert call(monkeypatch, task) == 2
    assert capsys.readouterr().err == f"nmt-train: error: some/file: {os.strerror(number)}\n"


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "argv", ["nmt-train"])
    with pytest.raises(ZeroDivisionError):
        run_command("train", task)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("given", [[], ["--help"]])
def test_output_that_cannot_be_written_is_one_line(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert call(monkeypatch, lambda *_: print("x"), *given) == 2
    assert capsys.readouterr().err == f"nmt-train: error: standard output: {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.parametrize("given", [[], ["--help"]])
def test_a_reader_that_left_is_no_error(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end, other = os.pipe()
    os.close(end)
    with open(other, "w") as left, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", left)
        assert call(monkeypatch, lambda *_: print("x"), *given) == 0
    assert capsys.readouterr().err == ""


def test_characters_that_the_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert call(monkeypatch, lambda *_: print("28 ± 0.1 字")) == 0
    assert output.buffer.getvalue() == b"28 \\xb1 0.1 \\u5b57\n"  # type: ignore[attr-defined]
