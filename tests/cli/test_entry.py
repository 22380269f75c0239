"""Ctrl-C while a command is still starting."""

import signal
import subprocess
import sys
import time

import pytest

START = """
import signal, sys
sys.argv = ["nmt-{0}", "run=nowhere"]
signal.signal(signal.SIGINT, signal.{1})
from nmt.cli.entry import {0}
print(flush=True)
{0}()
"""


def started(command: str, handler: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", START.format(command, handler)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("command", ["train", "evaluate", "translate", "compare"])
def test_an_interrupt_during_the_first_imports_is_one_line(command: str) -> None:
    process = started(command, "default_int_handler")  # a shell in the background has its commands ignore interrupts
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.05)  # into the imports, which take some tenths of a second
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors.decode()) == (130, f"nmt-{command}: interrupted\n")


def test_an_ignored_interrupt_stays_ignored() -> None:
    process = started("train", "SIG_IGN")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert b"no such directory" in errors
