"""How nmt-train processes=N handles errors, crashes and signals in its processes."""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from forks import ended, forked

from nmt.cli.launch import in_processes
from nmt.config.errors import UserError
from nmt.system.distributed import Interrupted
from nmt.system.processes import rank
from nmt.training import stopping as stopping_module
from nmt.training.stopping import StopSignals


def launched(job: Any, directory: Path) -> int:  # noqa: ANN401
    return in_processes(2, "train", job, None, directory)


def refuse(*_: object) -> int:
    raise UserError("data.train=corpus: no such file" if rank() == 0 else "something else")


def crash(*_: object) -> int:
    raise ZeroDivisionError("a bug")


def save_slowly(_: object, directory: Path, *__: object) -> int:
    """Stand in for training: work until a signal arrives, then take two seconds to save."""
    stopping_module.SAME_CTRL_C = 60  # on a busy machine the second signal may come late
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "message", "printed"),
    [
        (refuse, r"^(data\.train=corpus: no such file|something else)$", ""),
        (crash, r"^process [01] ended with status 1; the checkpoints are intact$", "ZeroDivisionError: a bug"),
    ],
)
def test_a_failure_reaches_the_caller_and_leaves_nothing(
    job: Any,  # noqa: ANN401
    message: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(UserError, match=message):
        launched(job, tmp_path)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert printed in capfd.readouterr().err


def wait_for(folder: Path, pattern: str, seconds: float = 120) -> None:
    """Wait until both processes have written their file."""
    deadline = time.monotonic() + seconds
    while len(list(folder.glob(pattern))) < 2:
        assert time.monotonic() < deadline, (folder / "printed").read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_to_the_launcher_waits_for_the_checkpoint_only(ignored: bool, tmp_path: Path) -> None:
    """Ctrl-C reaches each process twice, from terminal and launcher. Under nohup, SIGHUP stops none of them."""

    def work() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        return launched(save_slowly, tmp_path)

    child = forked(work, tmp_path / "printed")
    wait_for(tmp_path, "ready.*")
    if ignored:
        os.killpg(child, signal.SIGHUP)
        time.sleep(4)  # longer than processes need to save
        assert not any(tmp_path.glob("saved.*"))
    began = time.monotonic()
    os.killpg(child, signal.SIGINT)
    assert ended(child) == 128 + signal.SIGINT
    assert time.monotonic() - began < 25
    assert all((tmp_path / f"saved.{number}").exists() for number in range(2))
    assert "Received" not in (tmp_path / "printed").read_text()
    assert "leaked" not in (tmp_path / "printed").read_text()


@pytest.mark.slow
def test_processes_save_and_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    child = forked(lambda: launched(save_slowly, tmp_path), tmp_path / "printed")
    wait_for(tmp_path, "ready.*")
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    wait_for(tmp_path, "saved.*", 25)
