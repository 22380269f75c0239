"""What ends a run early: signals, and validations without a new best."""

import os
import signal

import pytest

from nmt.system.distributed import Interrupted
from nmt.training.stopping import SAME_CTRL_C, EarlyStopping, StopSignals

# Signals

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_is_noted_repetitions_are_not_and_ctrl_c_stops_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(number)
    now = 100.0
    monkeypatch.setattr("nmt.training.stopping.time.monotonic", lambda: now)
    with StopSignals() as signals:
        for repeated in (number, number, signal.SIGTERM):
            os.kill(os.getpid(), repeated)
        assert signals.received == number
        now += SAME_CTRL_C
        os.kill(os.getpid(), signal.SIGINT)  # a repeated Ctrl-C, from the launcher; ignored
        now += 0.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) == handler


@pytest.mark.parametrize("number", STOPPING)
def test_what_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)  # as nohup does for SIGHUP, and & in a script for SIGINT
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received is None
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_signal_saves_undisturbed_and_then_reaches_the_launcher() -> None:
    events: list[object] = []
    signal.signal(signal.SIGUSR2, lambda number, _: events.append(number))
    signals = StopSignals()

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        events.append("saved all of it")

    def work() -> None:
        with signals.saving(save):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert (signals.received, events) == (signal.SIGUSR2, [])
            signals.check()

    with pytest.raises(Interrupted):
        work()
    assert events == ["saved all of it", signal.SIGUSR2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_a_launcher_handles_is_left_to_it() -> None:
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is None
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL  # without a request, SIGUSR2 has no handler
    assert handled == [signal.SIGTERM]


# The best validation and patience


@pytest.mark.parametrize("patience", [2, None])
def test_patience_counts_validations_since_the_best_and_an_equal_score_is_no_improvement(patience: int | None) -> None:
    stopping, resumed = EarlyStopping("bleu", patience), EarlyStopping("bleu", patience)
    scores = [1.0, 0.5, 2.0, 2.0, 0.0]
    seen = [(stopping.update({"bleu": score}, step), stopping.exhausted) for step, score in enumerate(scores)]
    assert [best for best, _ in seen] == [True, False, True, False, False]
    assert [exhausted for _, exhausted in seen] == [False] * 4 + [patience is not None]
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.state_dict() == {"best": 2.0, "best_step": 2, "waited": 2}
