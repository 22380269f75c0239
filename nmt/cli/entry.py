"""Entry points of the commands. They import nothing large until Ctrl-C is handled."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


def train() -> None:
    """nmt-train: train, evaluate, draw alignments."""
    with exit_at_ctrl_c("train"):
        from nmt.cli.train import main
    main()


def translate() -> None:
    """nmt-translate: a filter from standard input to standard output."""
    with exit_at_ctrl_c("translate"):
        from nmt.cli.translate import main
    main()


def evaluate() -> None:
    """nmt-evaluate: score a trained run, or an ensemble, on a split of its corpus."""
    with exit_at_ctrl_c("evaluate"):
        from nmt.cli.commands import evaluate
    evaluate()


def compare() -> None:
    """nmt-compare: rank systems, test their differences for significance, show where they differ."""
    with exit_at_ctrl_c("compare"):
        from nmt.cli.commands import compare
    compare()


def serve() -> None:
    """nmt-serve: a page and a service for trained models."""
    with exit_at_ctrl_c("serve"):
        from nmt.cli.commands import serve
    serve()


def export() -> None:
    """nmt-export: pack a trained model into one file."""
    with exit_at_ctrl_c("export"):
        from nmt.cli.commands import export
    export()


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
