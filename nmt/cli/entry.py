"""The commands' entry points: they answer Ctrl-C in one line while the large libraries are still being imported."""

import importlib
import os
import signal
from contextlib import suppress
from typing import NoReturn


def train() -> None:
    """nmt-train."""
    _run("train")


def evaluate() -> None:
    """nmt-evaluate."""
    _run("evaluate")


def translate() -> None:
    """nmt-translate."""
    _run("translate")


def compare() -> None:
    """nmt-compare."""
    _run("compare")


def _run(command: str) -> None:
    def interrupted(*_: object) -> NoReturn:
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"nmt-{command}: interrupted\n".encode())
        os._exit(128 + signal.SIGINT)

    # During imports a signal exits at once: some modules catch every exception while they are imported.
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupted)
    module = importlib.import_module(f"nmt.cli.{command}")
    signal.signal(signal.SIGINT, handler)
    try:
        module.main()
    except KeyboardInterrupt:  # before or after the part of main that handles it
        interrupted()
