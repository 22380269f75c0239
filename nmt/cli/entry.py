"""Entry points of the commands. They import nothing large until Ctrl-C is handled."""

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn


def _run(command: str) -> None:
    with exit_at_ctrl_c(command):
        module = importlib.import_module(f"nmt.cli.{command}")
    try:
        module.main()
    except KeyboardInterrupt:  # outside the part of main that handles it
        _exit(command)


@contextmanager
def exit_at_ctrl_c(command: str) -> Iterator[None]:
    """During imports, end the process at Ctrl-C: some modules would swallow KeyboardInterrupt, others would abort."""
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: _exit(command))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(command: str) -> NoReturn:
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"nmt-{command}: interrupted\n".encode())
    os._exit(128 + signal.SIGINT)


train, evaluate, translate, compare, serve, export = (
    partial(_run, name) for name in ("train", "evaluate", "translate", "compare", "serve", "export")
)
