"""What processes=N makes of errors, crashes and signals in its processes."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import values_of
from forks import ended, forked

from nmt.cli.launch import train_in_processes
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.distributed import Interrupted
from nmt.processes import rank
from nmt.training import signals as signals_module
from nmt.training.signals import StopSignals

TWO = ["processes=2"]


def launched(job: Any, directory: Path) -> int:  # noqa: ANN401
    return train_in_processes(validated(TrainConfig, values_of("train", TWO)), directory, [], job=job)


def refuse(*_: object) -> int:
    raise UserError("data.train=corpus: no such file" if rank() == 0 else "something else")


def crash(*_: object) -> int:
    raise ZeroDivisionError("a bug")


def fail_on_the_second(*_: object) -> int:
    return 2 * rank()


def save_slowly(_: object, directory: Path, *__: object) -> int:
    """Works until a signal comes, and saves within two seconds."""
    signals_module.SAME_CTRL_C = 60  # a busy machine may be late to pass it on
    signals = StopSignals()
    try:
        with signals.saving(lambda: time.sleep(2)):
            (directory / f"ready.{rank()}").touch()
            while True:
                signals.check()
                time.sleep(0.05)
    except Interrupted as stop:
        (directory / f"saved.{rank()}").touch()
        return 128 + stop.signum


def test_an_error_reaches_the_caller(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with pytest.raises(UserError, match=r"^data\.train=corpus: no such file$"):
        launched(refuse, tmp_path)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]


def test_a_crash_shows_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"^process [01] ended with status 1; the checkpoints are intact$"):
        launched(crash, tmp_path)
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_a_failure_of_another_process_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^a process failed, as printed above$"):
        launched(fail_on_the_second, tmp_path)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_to_the_launcher_waits_for_the_checkpoint_only(ignored: bool, tmp_path: Path) -> None:
    """Ctrl-C reaches the processes twice, from the terminal and from the launcher; nohup's SIGHUP reaches nobody."""

    def work() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        return launched(save_slowly, tmp_path)

    child = forked(work, tmp_path / "printed")
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"ready.{number}").exists() for number in range(2)):
        assert time.monotonic() < deadline, (tmp_path / "printed").read_text()
        time.sleep(0.05)
    if ignored:
        os.killpg(child, signal.SIGHUP)
        time.sleep(4)  # longer than the processes would need to save
        assert not any(tmp_path.glob("saved.*"))
    began = time.monotonic()
    os.killpg(child, signal.SIGINT)
    assert ended(child) == 128 + signal.SIGINT
    assert time.monotonic() - began < 25
    assert all((tmp_path / f"saved.{number}").exists() for number in range(2))
    assert "Received" not in (tmp_path / "printed").read_text()
    assert "leaked" not in (tmp_path / "printed").read_text()
