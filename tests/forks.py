"""Run commands in forks of this process, which has imported their modules: this takes 0.01 s to start, not 3 s."""

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from conftest import values_of

from nmt.cli import entry
from nmt.cli.config_files import known_keys

Work = Callable[[], int]
NEEDED: dict[str, list[str]] = {
    "train": [],
    "evaluate": ["run=R"],
    "translate": ["run=R"],
    "compare": ["runs=R"],
    "export": ["run=R", "output=O"],
}


def forked(work: Work, output: Path) -> int:
    """Start `work` in a new process group and append its output to `output`. Returns the process id."""
    with output.open("ab") as file, open(os.devnull, "rb") as nothing:
        return _fork(work, (nothing, file, file))


def ended(child: int) -> int:
    """Wait for a process. Returns its status, negative after a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked_group(work: Work, size: int, output: Path) -> list[int]:
    """Start `work` in `size` processes that form a group, as torchrun would. Process r prints to output.r."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])

    def member(rank: int) -> int:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
        return work()

    return [forked(partial(member, rank), output.with_name(f"{output.name}.{rank}")) for rank in range(size)]


def killed_after(work: Work, seconds: float, output: Path) -> int:
    """Start `work`, and kill it and its child processes after `seconds`, unless it ends before. Returns its status."""
    return _ended_within(forked(work, output), seconds)


def call(
    *command: str | Path, stdin: bytes = b"", cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command such as "nmt-train", or a script's path, with its arguments, as in a shell."""
    work = partial(_run, *map(str, command), cwd=cwd, env=env or {})
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        status = _ended_within(_fork(work, (given, out, err)), 300)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([*map(str, command)], status, out.read(), err.read())


def worked(*command: str | Path, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command as `call` does, and assert that it succeeds."""
    done = call(*command, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done


def error_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Assert that a command ended with status 2 and one line of error, and return this line."""
    assert done.returncode == 2, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.decode().splitlines() if ": error: " in line]
    return line


def call_text(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as `call` does, with its output as text."""
    done = call(*command, cwd=cwd)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def _run(name: str, *words: str, cwd: Path | None, env: dict[str, str]) -> int:
    os.environ.update(env)
    os.chdir(cwd or ".")
    sys.argv = [name, *words]
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).parent))
        runpy.run_path(name, run_name="__main__")
    else:
        getattr(entry, name.removeprefix("nmt-"))()
    return 0


def _fork(work: Work, files: tuple[IO[bytes], IO[bytes], IO[bytes]]) -> int:
    _prepare()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 70  # if an exception ends the work
    try:
        os.setsid()
        sys.settrace(None)  # turns coverage off: os._exit would lose its data
        threading.settrace(None)
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False, encoding="utf-8")  # noqa: SIM115
            for number, mode in enumerate(("r", "w", "w"))
        )
        status = work()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended_within(child: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.killpg(child, signal.SIGKILL)
    return ended(child)


def _prepare() -> None:
    for name in ("cli.train", "cli.translate", "cli.evaluate", "training.job", "compare.compare"):
        importlib.import_module(f"nmt.{name}")
    importlib.import_module("torch._dynamo")  # otherwise the first optimizer imports it
    known_keys("train")  # most error messages need it
    for command, needed in NEEDED.items():  # parse the YAML files
        values_of(command, needed)
