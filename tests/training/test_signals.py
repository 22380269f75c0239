"""Signals are noted for the next checkpoint, and a launcher keeps its own."""

import os
import signal

import pytest

from nmt.system.distributed import Interrupted
from nmt.training.signals import SAME_CTRL_C, StopSignals

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
pytestmark = pytest.mark.usefixtures("signals_of_a_terminal")


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_is_noted_and_ctrl_c_after_it_stops_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(number)
    now = 100.0
    monkeypatch.setattr("nmt.training.signals.time.monotonic", lambda: now)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number
        now += SAME_CTRL_C
        os.kill(os.getpid(), signal.SIGINT)  # the launcher passes on what the terminal has sent already
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) == handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_repeats_does_not_disturb_the_checkpoint(number: signal.Signals) -> None:
    with StopSignals() as signals:
        for each in (number, number, signal.SIGTERM):
            os.kill(os.getpid(), each)
        assert signals.received == number


@pytest.mark.parametrize("number", STOPPING)
def test_what_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP, a script's & with SIGINT
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received is None
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_launcher_hears_of_its_signal_after_the_checkpoint() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    signals = StopSignals()

    def work() -> None:
        with signals.saving(lambda: heard.append(0)):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (signals.received, heard) == (signal.SIGUSR2, [])
            signals.check()

    with pytest.raises(Interrupted):
        work()
    assert heard == [0, signal.SIGUSR2]


def test_signals_during_the_save_do_not_disturb_it() -> None:
    saved: list[str] = []

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        saved.append("all of it")

    def work() -> None:
        signals = StopSignals()
        with signals.saving(save):
            os.kill(os.getpid(), signal.SIGTERM)
            signals.check()

    with pytest.raises(Interrupted):
        work()
    assert saved == ["all of it"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_a_launcher_ignores_is_left_to_it() -> None:
    ignored: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ignored.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is None
    assert ignored == [signal.SIGTERM]
    with StopSignals():
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL  # nobody has asked for it
