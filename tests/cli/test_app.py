"""The code that all commands share: sweeps, signals, directories that are no runs."""

import errno
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from nmt.cli import app, train
from nmt.config.errors import UserError


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")


def call(monkeypatch: pytest.MonkeyPatch, task: object, *arguments: str, command: str = "train") -> int:
    """Run a command with `task` in place of its work, and return the exit status."""
    monkeypatch.setattr(sys, "argv", [f"nmt-{command}", *arguments])
    with pytest.raises(SystemExit) as exit_:
        app.run_command(command, task)  # type: ignore[arg-type]
    return int(exit_.value.code or 0)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(*_: object) -> None:
        raise KeyboardInterrupt

    assert call(monkeypatch, task) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
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
        app.run_command("train", task)


def refuse(*_: object) -> None:
    raise UserError("no")


def test_a_refused_run_leaves_no_empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert call(monkeypatch, refuse) == 2
    assert not list(tmp_path.glob("outputs/train/*/*"))


def test_a_directory_that_the_user_made_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert call(monkeypatch, refuse, "hydra.run.dir=mine") == 2
    assert call(monkeypatch, refuse, "run=mine") == 2
    assert (tmp_path / "mine").is_dir()


def test_the_working_directory_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert call(monkeypatch, refuse, "run=typo", command="evaluate") == 2
    assert tmp_path.is_dir()
    assert not list(tmp_path.iterdir())


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


def test_closed_streams_are_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        patch.setattr(sys, "stderr", None)
        assert call(monkeypatch, lambda *_: print(len(sys.stdin.read()), file=sys.stderr)) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert call(monkeypatch, lambda *_: print("x")) == 2
    assert "nmt-train: error: standard output is closed" in capsys.readouterr().err


def test_characters_that_the_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert call(monkeypatch, lambda *_: print("28 ± 0.1 字")) == 0
    assert output.buffer.getvalue() == b"28 \\xb1 0.1 \\u5b57\n"  # type: ignore[attr-defined]


def test_a_deleted_working_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(SystemExit) as exit_:
        app.run_command("train", refuse, [])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "nmt-train: error: the working directory was deleted; change to another one\n"


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_without_a_folder_for_temporary_files_the_remedy_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setattr(sys, "argv", ["nmt-train", *arguments])
    with pytest.raises(SystemExit) as exit_:
        train.main()
    assert exit_.value.code == 2
    message = "no folder for temporary files can be written to; set TMPDIR to one"
    assert capsys.readouterr().err == f"nmt-train: error: {message}\n"
