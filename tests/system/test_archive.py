"""Archives: they unpack to what was packed, equal content gives equal bytes, and hostile archives are refused."""

import os
import stat
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from nmt.config.errors import UserError
from nmt.system import files as archive
from nmt.system.files import CONFIG, WEIGHTS, is_archive, unpacked, write_archive

HONEST = {CONFIG: b"seed: 1\n", "results.json": b"{}", WEIGHTS: bytes(range(256)) * 100}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder in which Python creates temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def honest(tmp_path: Path) -> Path:
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


def packed(path: Path, files: dict[str, bytes], mode: int = stat.S_IFREG | 0o644) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in (HONEST | files).items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (mode if name in files else 0) << 16
            file.writestr(entry, text, zipfile.ZIP_DEFLATED)


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    write_archive(path, HONEST)
    path.write_bytes(change(path.read_bytes()))


def claiming(size: int) -> Callable[[bytes], bytes]:
    """Return a function that makes an archive claim `size` bytes for its parameters, packed and unpacked."""

    def change(data: bytes) -> bytes:
        at = data.rindex(b"PK\1\2")
        return data[: at + 20] + struct.pack("<II", size, size) + data[at + 28 :]

    return change


def flipped(data: bytes) -> bytes:
    at = data.index(HONEST[WEIGHTS])
    return data[:at] + b"x" + data[at + 1 :]


def lzma(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, text in HONEST.items():
            file.writestr(name, text)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a path upwards": (lambda path: packed(path, {"../evil": b"x"}), "it holds ../evil, which no archive has"),
    "an absolute path": (lambda path: packed(path, {f"{path.parent}/evil": b"x"}), "which no archive has"),
    "another name": (lambda path: packed(path, {"sitecustomize.py": b"x"}), "which no archive has"),
    "a name with control characters": (lambda path: packed(path, {"a\x1b[31m": b"x"}), r"holds a\\x1b\[31m, which"),
    "no weights": (
        lambda path: zipfile.ZipFile(path, "w").writestr(CONFIG, "x"),
        "is damaged|has no checkpoints/best|not a zip",
    ),
    "a bomb": (lambda path: packed(path, {WEIGHTS: bytes(2**24)}), "bytes would become 16,"),
    "a claim of gigabytes": (lambda path: changed(path, claiming(2**31)), "would become 2,147,"),
    "a claim beyond the file": (lambda path: changed(path, claiming(40_000)), "best.safetensors"),
    "a flipped bit": (lambda path: changed(path, flipped), "best.safetensors: Bad CRC-32"),
    "an unusual method": (lzma, "packed in a way that is not supported"),
    "an encrypted entry": (
        lambda path: changed(path, lambda d: (a := d.rindex(b"PK\1\2")) * b"" + d[: a + 8] + b"\1" + d[a + 9 :]),
        "is encrypted",
    ),
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


def test_a_link_is_unpacked_as_the_text_that_it_holds(tmp_path: Path) -> None:
    packed(tmp_path / "model.nmt", {CONFIG: b"/etc/passwd"}, stat.S_IFLNK | 0o777)
    config = unpacked(tmp_path / "model.nmt", "run=x") / CONFIG
    assert not config.is_symlink()
    assert config.read_bytes() == b"/etc/passwd"


def test_what_is_written_can_be_read_however_well_it_packs(tmp_path: Path) -> None:
    text = b"0" * (archive.ALLOWANCE * 3)
    write_archive(tmp_path / "model.nmt", HONEST | {"data/test.source": text})
    assert content(unpacked(tmp_path / "model.nmt", "run=x"))["data/test.source"] == text


def test_a_file_that_cannot_be_read_or_is_a_pipe_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"run=pipe: is not an archive of nmt-export, or is damaged \(not a file\)"):
        unpacked(tmp_path / "pipe", "run=pipe")
    with pytest.raises(UserError, match="run=nowhere: cannot be read"):
        unpacked(tmp_path / "nowhere", "run=nowhere")
