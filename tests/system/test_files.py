"""Atomic writes: a file is complete or does not exist."""

import errno
import fcntl
import json
import math
import os
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from nmt.system.files import (
    check_contained,
    folders_with,
    is_locked,
    remove_leftovers,
    short_name,
    to_json,
    write_atomically,
)


def test_content_or_a_writer(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "a", b"one")
    write_atomically(tmp_path / "deep" / "a", lambda file: file.write(b"two"))
    assert (tmp_path / "deep" / "a").read_bytes() == b"two"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]


def test_a_failing_writer_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("no room")

    write_atomically(tmp_path / "a", b"whole")
    with pytest.raises(OSError, match="no room"):
        write_atomically(tmp_path / "a", fail)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"whole")]


def test_the_old_file_stands_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    seen = []
    write_atomically(path, lambda file: seen.append((file.write(b"new"), path.read_bytes())))
    assert seen == [(3, b"old")]


def test_the_content_is_on_the_disk_before_the_file_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure after the rename must not leave an empty file."""
    path, sync, seen = tmp_path / "a", os.fsync, []

    def synced(number: int) -> None:
        sync(number)
        if not stat.S_ISDIR(os.fstat(number).st_mode):
            seen.append((os.fstat(number).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", synced)
    write_atomically(path, b"new")
    assert seen == [(3, False)]


def test_leftovers_are_found_below_too(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in (".a.1.part", "sub/.b.2.part", "kept.part", ".lock"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [".lock", "kept.part"]


def test_a_file_that_goes_while_a_folder_is_looked_at_is_no_stray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "walk", lambda folder: [(folder, [], [".last.pt.1.part"])])
    check_contained(tmp_path)
    (tmp_path / ".last.pt.1.part").symlink_to("/etc")
    with pytest.raises(OSError, match="leads out of"):
        check_contained(tmp_path)


def test_json_has_no_infinity() -> None:
    text = to_json({"a": math.inf, "b": [math.nan, 1.5], "c": {"d": -math.inf}, "é": "ü"})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "é": "ü"}
    assert "é" in text


def test_a_free_lock_is_free_where_locks_need_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS answers EBADF to an exclusive lock on a file that is open for reading only."""
    real = fcntl.flock

    def flock(file: BinaryIO, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "bad file descriptor")
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / ".lock"
    path.touch()
    assert not is_locked(path)
    with path.open("r+b") as held:
        real(held, fcntl.LOCK_EX)
        assert is_locked(path)


def test_folders_are_found_behind_links_and_each_once(tmp_path: Path) -> None:
    for name in ("all/b", "elsewhere/run", "all/c/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mark").touch()
    (tmp_path / "all" / "a").symlink_to("../elsewhere/run")
    (tmp_path / "all" / "again").symlink_to("b")
    (tmp_path / "all" / "c" / "up").symlink_to("../..")
    (tmp_path / "all" / "broken").symlink_to("nowhere")
    found = folders_with(tmp_path / "all", "mark", "other")
    assert [path.resolve() for path in found] == [tmp_path / name for name in ("elsewhere/run", "all/b", "all/c/deep")]
    assert folders_with(tmp_path / "nowhere", "mark") == []


def test_a_short_name_is_ascii_and_distinct() -> None:
    texts = ["a-b", "a b", "ä", "ö", "\udcff", "x" * 400, "x" * 401]
    names = [short_name(text, 40) for text in texts]
    assert names[0] == "a-b"
    assert len({*names}) == len(texts)
    assert all(name.isascii() and len(name) <= 40 and not {*name} & {*" /"} for name in names)
