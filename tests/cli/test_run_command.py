"""Signals, errors of the system and closed output: one line at most, and the exit status."""

import errno
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from nmt.cli.run_command import run_command


def status_of(error: BaseException | None = None, *arguments: str) -> int:
    """Run a command that raises an error in place of its work, or prints a line, and return the exit status."""

    def work(_: object) -> None:
        if error is not None:
            raise error
        print("28 ± 0.1 字")

    with pytest.raises(SystemExit) as exit_:
        run_command("train", work, arguments)
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyboardInterrupt(), 128 + signal.SIGINT, "nmt-train: interrupted\n"),
        (OSError(errno.ENOSPC, "No space", "some/file"), 2, "nmt-train: error: some/file: No space\n"),
        (OSError(errno.EACCES, "Denied", "some/file"), 2, "nmt-train: error: some/file: Denied\n"),
    ],
)
def test_what_the_user_or_the_system_ends_is_one_line(
    error: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(error) == status
    assert capsys.readouterr().err == told


def test_a_fault_of_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        status_of(ZeroDivisionError())


@pytest.mark.parametrize("given", [[], ["--help"]])
def test_output_that_cannot_be_written_is_one_line_and_a_reader_that_left_is_no_error(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    outputs: dict[str | int, tuple[int, str]] = {theirs: (0, "")}
    if Path("/dev/full").exists():
        outputs["/dev/full"] = 2, f"nmt-train: error: standard output: {os.strerror(errno.ENOSPC)}\n"
    for output, (status, told) in outputs.items():
        with open(output, "w") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", file)
            assert status_of(None, *given) == status
        assert capsys.readouterr().err == told


def test_characters_that_the_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert status_of() == 0
    assert output.buffer.getvalue() == b"28 \\xb1 0.1 \\u5b57\n"  # type: ignore[attr-defined]
