"""The variables that say whether a process was started with others; and worker processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import call

from nmt.config.errors import UserError
from nmt.system.processes import GROUP_VARIABLES, Workers, group_size, leave_group, local_rank, rank, started_in_group

GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)


def test_a_member_of_a_group_can_leave_it() -> None:
    assert (started_in_group(), rank(), group_size(), local_rank()) == (True, 1, 2, 1)
    leave_group()
    assert (started_in_group(), rank(), group_size(), local_rank()) == (False, 0, 1, None)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_empty_variable_is_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert (started_in_group(), rank(), local_rank()) == (False, 0, None)


@pytest.mark.parametrize("command", [["compare", "runs=x"], ["export", "run=x", "output=y"], ["serve", "run=x"]])
def test_work_that_is_not_shared_is_done_by_every_process(command: list[str], tmp_path: Path) -> None:
    done = call(f"nmt-{command[0]}", *command[1:], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"nmt-{command[0]}: error: run")


# Worker processes: their number changes neither results nor errors, and all of them end.

KEY = "data.workers"


def work(number: int) -> int:
    time.sleep(0.01 * (number % 3))  # so that tasks finish in another order
    if number == 7:
        raise UserError("line 7: broken")
    if number == 77:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def sleep(seconds: int) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from nmt.system.processes import Workers\n"
        "print('started', __file__, __spec__)\n"
        f"with Workers(2, {KEY!r}) as workers:\n"
        "    print(list(workers.map(abs, [-1, -2, -3], 1)), __file__, __spec__)\n"
    )
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"started {script} None\n[1, 2, 3] {script} None\n", done.stderr


def test_results_come_in_order_from_as_many_processes_as_are_needed() -> None:
    with Workers(2, KEY) as workers:
        assert set(workers.map(sleep, [0] * 5, 5)) == {os.getpid()}
        pids = list(workers.map(sleep, [0] * 20, 5))
        assert list(workers.map(work, range(10, 40), 2)) == [number**2 for number in range(10, 40)]
        assert list(workers.map(work, [], 0)) == []
    assert set(pids[:5]) == {os.getpid()}
    assert len(set(pids[5:]) - {os.getpid()}) in {1, 2}
    with Workers(1, KEY) as workers:
        assert set(workers.map(sleep, [0] * 9, 5)) == {os.getpid()}


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_comes_after_the_results_before_it(count: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(3)
        raise UserError("line 3: broken")

    results: list[int] = []
    with Workers(count, KEY) as workers:
        with pytest.raises(UserError, match=r"^line 3: broken$"):
            results.extend(workers.map(work, numbers(), 2))
        assert results == [0, 1, 4]
        with pytest.raises(UserError, match=r"^line 7: broken$"):
            results.extend(workers.map(work, range(3, 40), 2))
    assert results == [number * number for number in range(7)]


def test_a_killed_worker_is_one_clear_line() -> None:
    message = r"^data\.workers=2: a worker process was killed; if memory ran out, set a lower data\.workers$"
    with Workers(2, KEY) as workers, pytest.raises(UserError, match=message):
        list(workers.map(work, range(70, 100), 2))


def ends(pid: int) -> bool:
    for _ in range(200):
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
sys.path[:0] = sys.argv[1:]
from test_processes import Workers, sleep
if __name__ == "__main__":
    with Workers(2, "data.workers") as workers:
        for pid in workers.map(sleep, [0, 1, 1, 1, 1], 0):
            print(pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_the_workers_end_with_the_main_process(end: signal.Signals) -> None:
    command = [sys.executable, "-c", SLEEPERS, *map(str, Path(__file__).parents[:2])]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as main:
        assert main.stdout is not None
        pid = int(main.stdout.readline())
        if end == signal.SIGINT:
            os.killpg(main.pid, end)  # Ctrl-C in a terminal reaches all processes
        else:
            main.send_signal(end)
        _, errors = main.communicate(timeout=30)
    assert ends(pid)
    assert errors.count("Traceback") == (end == signal.SIGINT)  # only the main process prints one
