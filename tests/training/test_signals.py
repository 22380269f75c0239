"""Signals are noted for the next checkpoint, and a launcher keeps its own."""

import os
import signal
from collections.abc import Iterator

import pytest

from nmt.training.signals import StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _as_a_process_begins() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_noted_and_the_second_is_at_once(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.noted == number
        signals.hand_on()  # to nobody
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == handler


def test_a_launcher_hears_of_its_signal_after_the_checkpoint() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (signals.noted, heard) == (signal.SIGUSR2, [])
        signals.hand_on()
    assert heard == [signal.SIGUSR2]


def test_what_a_launcher_ignores_is_left_to_it() -> None:
    ignored: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ignored.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.noted is None
    assert ignored == [signal.SIGTERM]
    with StopSignals():
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL  # nobody has asked for it
