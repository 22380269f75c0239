"""Full disks, read-only folders and too many open files.

Each gives an error of one line and loses nothing; the run can go on once there is room.
"""

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import call, error_of
from kills import curves, differing, outcome
from test_kills import RECIPE

from nmt.training.journal import log_to_file


def trained(folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run nmt-train in folder/run."""
    folders = f"data.cache_dir={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}"
    return call("nmt-train", *RECIPE, *folders, cwd=Path("/"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    assert trained(folder).returncode == 0
    return folder


def same(folder: Path, whole: Path) -> None:
    found = [{**outcome(each / "run"), "config.yaml": None} for each in (folder, whole)]
    assert differing(*found) == []
    assert curves(folder / "run") == curves(whole / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system of 1 MB on a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "nmt-test", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(small_disk: Path, whole: Path) -> None:
    """The disk grows in small steps, from too small for the first file to large enough for the whole run."""
    needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    messages = []
    for size in (8, 40, *range(64, 4 * needed, needed // 8)):
        remount(small_disk, f"size={size}k")
        done = trained(small_disk)
        if done.returncode == 0:
            break
        messages.append(error_of(done))
        assert "No space left on device" in messages[-1]
    assert done.returncode == 0
    assert len(messages) >= 6
    assert any("last.pt" in message for message in messages)
    same(small_disk, whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_line_of_the_log_that_finds_no_room_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left on device"), log_to_file(Path("/dev/full")):
        logging.getLogger("nmt").info("a line")
    assert "Traceback" not in capsys.readouterr().err
