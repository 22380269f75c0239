"""Worker processes: equal results for any number of them, errors as in one process, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nmt.config.errors import UserError
from nmt.data.prepare.workers import Workers


def square(number: int) -> int:
    time.sleep(0.01 * (number % 3))  # so that results come out of order
    return number * number


def fail_at_seven(number: int) -> int:
    if number == 7:
        raise UserError("line 7: broken")
    return number


def die_at_seven(number: int) -> int:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def sleep(_: int) -> int:
    time.sleep(60)
    return 0


def process_id(_: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order(count: int) -> None:
    with Workers(count) as workers:
        assert list(workers.map(square, range(40), 5)) == [number * number for number in range(40)]
        assert list(workers.map(abs, range(-9, 0), 0)) == list(range(9, 0, -1))  # the same processes, another function
        assert list(workers.map(square, [], 0)) == []


def test_a_small_corpus_starts_no_process() -> None:
    with Workers(2) as workers:
        assert set(workers.map(process_id, range(5), 5)) == {os.getpid()}
        assert workers._processes == {}
        others = set(workers.map(process_id, range(20), 5)) - {os.getpid()}
    assert len(others) == 2
    with Workers(1) as workers:
        assert set(workers.map(process_id, range(20), 5)) == {os.getpid()}


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_comes_after_the_results_before_it(count: int) -> None:
    results: list[int] = []
    with Workers(count) as workers, pytest.raises(UserError, match=r"^line 7: broken$"):
        results.extend(workers.map(fail_at_seven, range(40), 2))
    assert results == list(range(7))


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_reader_comes_after_the_results_before_it(count: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(10)
        raise UserError("line 10: broken")

    results: list[int] = []
    with Workers(count) as workers, pytest.raises(UserError, match=r"^line 10: broken$"):
        results.extend(workers.map(square, numbers(), 2))
    assert results == [number * number for number in range(10)]


def test_a_killed_worker_is_one_clear_line() -> None:
    message = r"^data\.workers=2: a worker process was killed \(Killed\); if memory ran out, set a lower data\.workers$"
    with Workers(2) as workers, pytest.raises(UserError, match=message):
        list(workers.map(die_at_seven, range(40), 2))


def ends(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


SLEEPERS = """
import sys
sys.path.insert(0, sys.argv[1])
import test_workers
from nmt.data.prepare.workers import Workers
if __name__ == "__main__":
    with Workers(2) as workers:
        print(*set(workers.map(test_workers.process_id, range(20), 0)), flush=True)
        list(workers.map(test_workers.sleep, range(20), 0))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_workers_end_with_the_main_process(end: signal.Signals) -> None:
    command = [sys.executable, "-c", SLEEPERS, str(Path(__file__).parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as main:
        assert main.stdout is not None
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.2)
        if end == signal.SIGINT:
            os.killpg(main.pid, end)  # as Ctrl-C in a terminal
        else:
            main.send_signal(end)
        _, errors = main.communicate(timeout=10)
    assert all(map(ends, pids))
    assert errors.count("Traceback") == (end == signal.SIGINT)  # of the main process alone
