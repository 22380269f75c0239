"""The leaderboard as a user runs it: killed, continued with the same command, with the same table at the end."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from forks import call_text, ended, forked

from nmt.cli import train

COMMAND = ["experiment=leaderboard", "data=demo", *TINY, "decoder.readout_dim=16", "training.max_steps=6"]
COMMAND += ["attention=luong_dot,none", "seed=1,2", "hydra.sweep.dir=board"]
MEASURED = ("second", "equal_time")  # parts of the names of measured times


def table(folder: Path) -> Any:  # noqa: ANN401
    """Read comparison.json without measured times."""

    def without_times(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, dict):
            return {k: without_times(v) for k, v in value.items() if not any(part in k for part in MEASURED)}
        return [without_times(item) for item in value] if isinstance(value, list) else value

    return without_times(json.loads((folder / "board" / "comparison" / "comparison.json").read_text()))


@pytest.mark.slow
@pytest.mark.system
def test_a_killed_leaderboard_ends_in_the_table_of_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert call_text("nmt-train", *COMMAND, cwd=whole).returncode == 0

    def work() -> int:
        os.chdir(killed)
        sys.argv = ["nmt-train", *COMMAND]
        train.main()
        return 0

    process = forked(work, tmp_path / "output")
    third = killed / "board" / "attention-luong_dot_seed-2" / "checkpoints" / "last.pt"
    while not third.exists():
        assert os.waitpid(process, os.WNOHANG) == (0, 0), (tmp_path / "output").read_text()
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL

    continued = call_text("nmt-train", *COMMAND, cwd=killed)
    assert continued.returncode == 0, continued.stderr
    assert continued.stderr.count("already finished: skipped") == 2
    assert table(killed) == table(whole)
    assert len(table(killed)["comparisons"][0]["runs"]) == 4
