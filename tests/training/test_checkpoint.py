"""Checkpoints: whole or not at all, data only."""

import pickle
from pathlib import Path

import pytest
import torch

from nmt.config.errors import UserError
from nmt.training import checkpoint


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"step": 1})
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, {"step": 2, "bad": lambda: None})
    assert checkpoint.load(path) == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps(Hostile())])
def test_corrupt_or_hostile_files_are_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"last\.pt: is corrupt") as error:
        checkpoint.load(tmp_path / "last.pt")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "hacked").exists()


def test_a_hostile_object_inside_a_torch_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Hostile()}, tmp_path / "last.pt")
    with pytest.raises(UserError, match="corrupt"):
        checkpoint.load(tmp_path / "last.pt")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_noticed(place: float, tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    checkpoint.save(path, {"model": {"weight": torch.randn(100, 100)}})
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"best\.safetensors: is corrupt"):
        checkpoint.load(path)
