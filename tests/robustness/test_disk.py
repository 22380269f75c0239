"""Full disks, folders that must not be written to, too many open files, clocks that go back: told in one line, nothing
lost, and the run goes on once there is room."""

import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forks import Work, ended, forked
from kills import curves, differing, killed_at, outcome
from test_kills import RECIPE

from nmt.system.files import write_atomically
from nmt.training.journal import TensorBoard, log_to_file


def command(folder: Path, *overrides: str, before: Callable[[], object] = lambda: None) -> Work:
    """nmt-train, as a user calls it, in folder/run."""
    words = ["nmt-train", *RECIPE, f"data.cache_dir={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}", *overrides]

    def work() -> int:
        from nmt.cli.train import main

        torch.set_num_threads(1)
        sys.argv = words
        os.chdir("/")
        before()
        main()
        return 0

    return work


def refused_in_one_line(work: Work, output: Path) -> str:
    """Returns what is said."""
    output.unlink(missing_ok=True)
    assert ended(forked(work, output)) == 2, output.read_text()
    errors = [line for line in output.read_text().splitlines() if "error: " in line]
    assert len(errors) == 1, output.read_text()
    assert "Traceback" not in output.read_text(), output.read_text()
    return errors[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    output = folder.with_suffix(".txt")
    assert ended(forked(command(folder), output)) == 0, output.read_text()
    return folder


def same(folder: Path, whole: Path) -> None:
    found = [{**outcome(each / "run"), "config.yaml": None} for each in (folder, whole)]
    assert differing(*found) == []
    assert curves(folder / "run") == curves(whole / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file system of its own."""
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
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(small_disk: Path, whole: Path, tmp_path: Path) -> None:
    """From a disk too small for the first file to one that is large enough, growing in small steps."""
    needed = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    messages = []
    for size in (8, 40, *range(64, 4 * needed, needed // 8)):
        remount(small_disk, f"size={size}k")
        output = tmp_path / "output.txt"
        output.unlink(missing_ok=True)
        status = ended(forked(command(small_disk), output))
        printed = output.read_text()
        assert status in {0, 2}, printed
        assert "Traceback" not in printed, printed
        if status == 0:
            break
        (message,) = [line for line in printed.splitlines() if "error: " in line]
        assert "No space left on device" in message
        messages.append(message)
    assert status == 0
    assert len(messages) >= 6
    assert any("last.pt" in message for message in messages)
    same(small_disk, whole)


@pytest.mark.slow
def test_a_run_in_a_folder_that_became_read_only_is_left_as_it_is(
    small_disk: Path, whole: Path, tmp_path: Path
) -> None:
    remount(small_disk, "size=100m")
    output = tmp_path / "output.txt"

    assert ended(forked(killed_at(command(small_disk), 150, small_disk), output)) == -9
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    remount(small_disk, "ro")
    message = refused_in_one_line(command(small_disk), output)
    assert "Read-only file system" in message
    assert str(small_disk / "run") in message
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    remount(small_disk, "rw")
    assert ended(forked(command(small_disk), output)) == 0, output.read_text()
    same(small_disk, whole)


@pytest.mark.slow
def test_without_free_file_descriptors_the_run_stops_and_goes_on_with_more(whole: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "scene", tmp_path / "output.txt"
    folder.mkdir()
    said = set()
    for limit in range(4, 40, 2):

        def few(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        output.unlink(missing_ok=True)
        status = ended(forked(command(folder, before=few), output))
        assert status in {0, 2}, (limit, output.read_text())
        assert "Traceback" not in output.read_text(), (limit, output.read_text())
        said |= {line for line in output.read_text().splitlines() if "error: " in line}
        if status == 0:
            break
    assert any("Too many open files" in line for line in said), said
    assert not any("delete" in line for line in said), said
    if status:
        assert ended(forked(command(folder), output)) == 0, output.read_text()
    same(folder, whole)


@pytest.mark.system
def test_a_file_that_must_not_grow_leaves_the_old_one(tmp_path: Path) -> None:
    """What a quota does, with what every system has: a limit on the size of files."""
    path, output = tmp_path / "last.pt", tmp_path / "output.txt"
    write_atomically(path, lambda file: torch.save({"weights": torch.zeros(10)}, file))
    before = path.read_bytes()

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            write_atomically(path, lambda file: torch.save({"weights": torch.ones(100_000)}, file))
        except OSError as error:
            print(error.filename, error.strerror)
            return 3
        return 0

    assert ended(forked(work, output)) == 3, output.read_text()
    assert output.read_text() == f"{path} File too large\n"
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".part"] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_line_of_the_log_that_finds_no_room_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left on device"), log_to_file(Path("/dev/full")):
        logging.getLogger("nmt").info("a line")
    assert "Traceback" not in capsys.readouterr().err


def test_other_errors_than_the_systems_are_told_as_they_are(tmp_path: Path) -> None:
    def write(file: object) -> None:
        raise RuntimeError("a fault of the program")

    with pytest.raises(RuntimeError, match="a fault of the program"):
        write_atomically(tmp_path / "file", write)


@pytest.mark.slow
@pytest.mark.system
def test_two_processes_in_one_directory(tmp_path: Path) -> None:
    """The second is refused while the first trains; the lock of a first one that was killed is in nobody's way."""
    import signal

    folder, output = tmp_path / "scene", tmp_path / "first.txt"
    folder.mkdir()
    first = forked(command(folder, "training.max_epochs=500"), output)
    until = time.monotonic() + 120
    while not (folder / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.01)
    message = refused_in_one_line(command(folder, "training.max_epochs=500"), tmp_path / "second.txt")
    assert f"process {first} is training there; wait for it or stop it" in message
    os.killpg(first, signal.SIGKILL)
    assert ended(first) == -9
    assert ended(forked(command(folder, "training.max_steps=7"), tmp_path / "third.txt")) == 0


@pytest.mark.parametrize("hours", [-10, 0])
def test_a_clock_that_goes_back_leaves_tensorboards_files_in_order(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that stands still: files of one second would be ordered by the numbers of their processes."""
    now = [1_800_000_000.0]
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1x.odd").write_text("")
    monkeypatch.setattr(time, "time", lambda: now[0])
    for start in range(3):
        with TensorBoard(tmp_path / "tensorboard", resume_step=10 * start or None) as board:
            for step in range(10 * start + 1, 10 * start + 15):
                board.scalars(step, {"train/loss": float(100 * start + step)})
        now[0] += 3600 * hours
        monkeypatch.setattr(os, "getpid", lambda start=start: 900 - start)
    (points,) = curves(tmp_path).values()
    assert [step for step, _ in points] == [*range(1, 35)]
    files = sorted((tmp_path / "tensorboard").iterdir())
    assert len(files) == 4
    shutil.rmtree(tmp_path / "tensorboard")
