"""Ctrl-C during a command's imports gives one line and status 130, even if an import catches exceptions."""

import os
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from forks import killed_after

from nmt.cli import entry

COMMANDS = ("train", "evaluate", "translate", "compare", "export", "serve")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("command", "module", "given"),
    [
        ("train", "nmt.cli.train", []),
        ("evaluate", "nmt.cli.evaluate", []),
        ("serve", "nmt.serve.server", ["run=x"]),
    ],
)
def test_ctrl_c_during_an_import_is_one_line(command: str, module: str, given: list[str], tmp_path: Path) -> None:
    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == module:
                with suppress(BaseException):  # some libraries catch all exceptions around imports
                    os.kill(os.getpid(), signal.SIGINT)

    def work() -> int:
        sys.modules.pop(module, None)
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
        os.chdir(tmp_path)
        sys.argv = [f"nmt-{command}", *given]
        getattr(entry, command)()
        return 0

    assert killed_after(work, 60, tmp_path / "output") == 130
    assert (tmp_path / "output").read_text() == f"nmt-{command}: interrupted\n"


def start_python() -> None:
    sys.exit(subprocess.run([sys.executable, "-c", "import random"], check=False).returncode)


def test_what_a_command_starts_imports_nothing_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(3)")

    def work() -> int:
        os.chdir(tmp_path)
        entry._run("train", __name__, "start_python")
        return 0

    assert killed_after(work, 60, tmp_path / "output") == 0


def test_the_handler_is_put_back_and_an_ignored_signal_stays_ignored() -> None:
    for handler in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, handler)
        with entry.exit_at_ctrl_c("train"):
            assert (signal.getsignal(signal.SIGINT) == signal.SIG_IGN) == (handler == signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == handler


def test_the_commands_begin_here_and_import_nothing_large_before() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {f"nmt-{command}": f"nmt.cli.entry:{command}" for command in COMMANDS}
    code = "import nmt.cli.entry, sys; print(sorted({'hydra', 'omegaconf', 'pydantic', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
