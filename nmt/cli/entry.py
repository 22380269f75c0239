"""Entry points of the commands. They import nothing large until Ctrl-C is handled."""

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


def train() -> None:
    """Run nmt-train: train a model, evaluate it and draw its alignments."""
    _run("train", "nmt.cli.train", "main")


def translate() -> None:
    """Run nmt-translate: translate standard input to standard output."""
    _run("translate", "nmt.cli.translate", "main")


def evaluate() -> None:
    """Run nmt-evaluate: score a trained run, or an ensemble, on a split of its corpus."""
    _run("evaluate", "nmt.cli.commands", "evaluate_main")


def compare() -> None:
    """Run nmt-compare: rank systems, test their differences for significance, show where they differ."""
    _run("compare", "nmt.cli.commands", "compare_main")


def serve() -> None:
    """Run nmt-serve: serve a page and a web service for trained models."""
    _run("serve", "nmt.cli.commands", "serve_main")


def export() -> None:
    """Run nmt-export: pack a trained model into one file."""
    _run("export", "nmt.cli.commands", "export_main")


def _run(command: str, module: str, name: str) -> None:
    # Python programs that the command starts must not import what lies in the working directory, such as random.py.
    os.environ["PYTHONSAFEPATH"] = "1"
    with exit_at_ctrl_c(command):
        function = getattr(importlib.import_module(module), name)
    function()


@contextmanager
def exit_at_ctrl_c(command: str) -> Iterator[None]:
    """End the process at Ctrl-C during imports: some modules would swallow KeyboardInterrupt, others would abort."""
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
