"""Threads that wait on a busy machine sleep, and spin on an idle one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmt.system import machine as contention
from nmt.system.machine import Usage, is_contended

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="of Linux alone")


@pytest.mark.parametrize(
    ("others", "threads", "cpus", "expected"),
    [
        (0.0, 2, 2, False),
        (0.2, 2, 2, False),  # a daemon in the background
        (1.0, 2, 2, True),
        (2.0, 2, 2, True),
        (1.0, 2, 4, False),  # enough CPUs for all
        (3.0, 2, 4, True),
        (14.0, 2, 16, False),
    ],
)
def test_the_machine_is_busy_if_others_leave_too_little(others: float, threads: int, cpus: int, expected: bool) -> None:
    before, after = Usage(100.0, 50.0, 10.0), Usage(100.0 + 3.0 + 2 * others, 53.0, 12.0)
    assert is_contended(before, after, threads, cpus) is expected


def test_usage_counts_this_process_among_all() -> None:
    before = Usage.now()
    while Usage.now().here < before.here + 0.2:
        pass
    after = Usage.now()
    assert after.all - before.all > 0.1
    assert after.clock > before.clock


def in_new_process(code: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in (*contention.SETTINGS, "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=kept | environment).stdout


@pytest.mark.slow
def test_idle_threads_come_and_go() -> None:
    """For 2 threads on 4 CPUs, 3 idle Python threads start, each with one more thread of OpenMP."""
    code = """
import os, time, torch
from nmt.system.machine import IdleThreads
torch.set_num_threads(2)
torch.ones(2**20).add_(1.0)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
idle = IdleThreads(2, 4)
print(count() - before)
idle.end()
end = time.monotonic() + 20
while count() > before and time.monotonic() < end:
    time.sleep(0.01)
print(count() - before)
"""
    assert in_new_process(code).split() == ["6", "0"]


@pytest.mark.slow
def test_a_watch_ends_with_its_context_and_one_thread_and_users_own_settings_need_none() -> None:
    code = """
import os, threading, torch
from nmt.system.machine import fair_waiting
for threads, setting in ((2, {}), (1, {}), (2, {"GOMP_SPINCOUNT": "1000"}), (2, {"OMP_WAIT_POLICY": "active"})):
    torch.set_num_threads(threads)
    os.environ.update(setting)
    with fair_waiting():
        within = threading.active_count()
    print(within, threading.active_count())
    for name in setting:
        del os.environ[name]
"""
    assert in_new_process(code).splitlines() == ["2 1", "1 1", "1 1", "1 1"]


def test_the_watch_reacts_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle threads are added once when the machine becomes busy, and end when it is idle again."""
    import threading

    answers, seen = iter([True, True, False, False, True]), []

    class Recorded:
        def __init__(self, threads: int, cpus: int) -> None:
            seen.append("start")

        def end(self) -> None:
            seen.append("end")

    end = threading.Event()

    def next_answer(*_: object) -> bool:
        answer = next(answers, None)
        if answer is None:
            end.set()
        return bool(answer)

    monkeypatch.setattr(contention, "PERIOD", 0.0)
    monkeypatch.setattr(contention, "IdleThreads", Recorded)
    monkeypatch.setattr(contention, "is_contended", next_answer)
    contention._watch(2, 2, end)
    assert seen == ["start", "end", "start", "end"]
