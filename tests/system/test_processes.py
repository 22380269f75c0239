"""The variables that say whether a process was started with others."""

import os
import signal
import time
from pathlib import Path

import pytest
from forks import call, ended, forked

from nmt.config.errors import UserError
from nmt.system import distributed
from nmt.system.processes import GROUP_VARIABLES, group_size, leave_group, local_rank, rank, started_in_group

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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "x", "RANK=x: is not a number"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE=-2: is not a number"),
        ("MASTER_PORT", "²", "MASTER_PORT=²: is not a number"),
        ("RANK", "2", "RANK=2: is not below WORLD_SIZE=2"),
    ],
)
def test_what_no_launcher_sets_is_one_line(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{message}.*unset RANK and WORLD_SIZE$"):
        rank()
    done = call("nmt-evaluate", "run=x")
    assert (done.returncode, done.stderr.decode().count("\n")) == (2, 1)
    assert done.stderr.decode().startswith(f"nmt-evaluate: error: {message}")


@pytest.mark.parametrize("command", [["compare", "runs=x"], ["export", "run=x", "output=y"], ["serve", "run=x"]])
def test_work_that_is_not_shared_is_done_by_every_process(command: list[str], tmp_path: Path) -> None:
    done = call(f"nmt-{command[0]}", *command[1:], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(f"nmt-{command[0]}: error: run")


def test_who_waits_for_the_others_says_so(tmp_path: Path) -> None:
    def work() -> int:
        os.environ.update(GROUP)
        distributed.PATIENCE = 0.1
        with distributed.ProcessGroup.join():
            return 0

    child = forked(work, tmp_path / "output")
    try:
        while not (text := (tmp_path / "output").read_text()).endswith("\n"):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), text
            time.sleep(0.02)
    finally:
        os.killpg(child, signal.SIGKILL)
        ended(child)
    assert text == (
        "RANK=1, WORLD_SIZE=2: waiting for the other processes at localhost:1; to run a process alone, unset RANK and "
        "WORLD_SIZE\n"
    )
