"""A file is complete or does not exist; archives unpack to what was packed, and hostile ones are refused."""

import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from nmt.config.errors import UserError
from nmt.system.files import (
    ALLOWANCE,
    CONFIG,
    WEIGHTS,
    folders_with,
    is_archive,
    short_name,
    to_json,
    unpacked,
    write_archive,
    write_atomically,
)


def test_the_old_file_stands_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path, seen = tmp_path / "deep" / "a", []
    write_atomically(path, b"old")
    write_atomically(path, lambda file: seen.append((file.write(b"new"), path.read_bytes())))
    assert seen == [(3, b"old")]

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_atomically(path, fail)
    assert [(each.name, each.read_bytes()) for each in path.parent.iterdir()] == [("a", b"new")]


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


def test_json_has_no_infinity() -> None:
    text = to_json({"a": math.inf, "b": [math.nan, 1.5], "c": {"d": -math.inf}, "é": "ü"})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "é": "ü"}
    assert "é" in text


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


HONEST = {CONFIG: b"seed: 1\n", "results.json": b"{}", WEIGHTS: bytes(range(256)) * 100}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder in which Python creates temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def honest(tmp_path: Path, temporary: Path) -> Path:
    write_archive(tmp_path / "model.nmt", HONEST)
    return tmp_path / "model.nmt"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_packed_comes_back_in_a_private_folder(honest: Path, temporary: Path) -> None:
    folder = unpacked(honest, "run=model.nmt")
    assert content(folder) == HONEST
    assert folder.parent == temporary
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert unpacked(honest, "run=model.nmt") == folder
    write_archive(honest, HONEST | {"results.json": b"[]"})
    assert content(unpacked(honest, "run=model.nmt"))["results.json"] == b"[]"


def test_equal_content_is_equal_bytes_and_a_zip_file_like_others(honest: Path, tmp_path: Path) -> None:
    write_archive(tmp_path / "again.nmt", HONEST)
    assert honest.read_bytes() == (tmp_path / "again.nmt").read_bytes()
    with zipfile.ZipFile(honest) as file:
        assert file.testzip() is None
        assert {stat.S_IMODE(entry.external_attr >> 16) for entry in file.infolist()} == {0o644}
    assert is_archive(honest)
    assert not is_archive(tmp_path)
    assert not is_archive(Path(__file__))


def test_an_archive_packed_again_by_hand_is_taken(tmp_path: Path) -> None:
    """Other zip programs compress all files, and add entries for folders."""
    path = tmp_path / "model.nmt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.mkdir("checkpoints")
        for name, text in HONEST.items():
            file.writestr(name, text)
    assert content(unpacked(path, "run=model.nmt")) == HONEST


def packed(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in (HONEST | files).items():
            file.writestr(name, text)


def flip(path: Path) -> None:
    write_archive(path, HONEST)
    path.write_bytes(path.read_bytes().replace(HONEST[WEIGHTS], b"x" + HONEST[WEIGHTS][1:]))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path upwards": (lambda path: packed(path, {"../evil": b"x"}), "it holds ../evil, which no archive has"),
    "a name with control characters": (lambda path: packed(path, {"a\x1b[31m": b"x"}), r"holds a\\x1b\[31m, which"),
    "no weights": (
        lambda path: zipfile.ZipFile(path, "w").writestr(CONFIG, "x"),
        "is damaged|has no checkpoints/best|not a zip",
    ),
    "a bomb": (lambda path: packed(path, {WEIGHTS: bytes(2**24)}), "bytes would become 16,"),
    "a flipped bit": (flip, "Bad CRC-32 for file 'checkpoints/best.safetensors'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_damaged_archive_is_one_line_and_leaves_nothing(
    name: str, tmp_path: Path, temporary: Path
) -> None:
    make, message = HOSTILE[name]
    path = tmp_path / "hostile.nmt"
    make(path)
    before = {*tmp_path.parent.iterdir(), *tmp_path.iterdir()}
    with pytest.raises(UserError, match=message) as error:
        unpacked(path, "run=hostile.nmt")
    assert str(error.value).startswith("run=hostile.nmt: is not an archive of nmt-export, or is damaged (")
    assert "\n" not in str(error.value)
    assert {*tmp_path.parent.iterdir(), *tmp_path.iterdir()} == before
    assert not [*temporary.iterdir()]


def test_what_is_written_can_be_read_however_well_it_packs(tmp_path: Path) -> None:
    text = b"0" * (ALLOWANCE * 3)
    write_archive(tmp_path / "model.nmt", HONEST | {"data/test.source": text})
    assert content(unpacked(tmp_path / "model.nmt", "run=x"))["data/test.source"] == text
