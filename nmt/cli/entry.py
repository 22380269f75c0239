"""Entry points of the commands. They import nothing large until Ctrl-C is handled."""

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn


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


train = partial(_run, "train", "nmt.cli.train", "main")
translate = partial(_run, "translate", "nmt.cli.translate", "main")
evaluate = partial(_run, "evaluate", "nmt.cli.evaluate", "main")
compare = partial(_run, "compare", "nmt.cli.evaluate", "compare_main")
serve = partial(_run, "serve", "nmt.cli.serve", "main")
export = partial(_run, "export", "nmt.cli.export", "main")
