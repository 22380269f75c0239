"""Ctrl-C while a command is still starting."""

import signal
import subprocess
import sys
import time

import pytest

START = "import sys; sys.argv = ['nmt-{0}', 'run=nowhere']; from nmt.cli.entry import {0}; print(flush=True); {0}()"


@pytest.mark.parametrize("command", ["train", "evaluate", "translate", "compare"])
def test_an_interrupt_during_the_first_imports_is_one_line(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell in the background lets its commands ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.05)  # into the imports, which take some tenths of a second
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors.decode()) == (130, f"nmt-{command}: interrupted\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START.format("train")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert b"no such directory" in errors
