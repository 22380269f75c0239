"""Hostile checkpoints, made to do harm, and checkpoints that do not belong to the run."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nmt.model.checkpoints import save_checkpoint

MARK = "executed"  # the folder that hostile code makes if it is executed
State = dict[str, Any]


class Command:
    """An object whose pickle makes the folder MARK when pickle.load reads it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (MARK,)


class Storage:
    """A storage of torch that claims to hold `count` numbers."""

    def __init__(self, count: int) -> None:
        self.count = count


class Claimed:
    """A tensor that claims a shape, stride and offset in a storage."""

    def __init__(self, storage: Storage, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
        self.parts = (storage, offset, shape, stride, False, OrderedDict())

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return torch._utils._rebuild_tensor_v2, self.parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: object) -> tuple[object, ...] | None:
        return ("storage", torch.FloatStorage, "0", "cpu", thing.count) if isinstance(thing, Storage) else None


def before_an_archive(path: Path, state: State) -> None:
    """Write a file with two contents: zipfile finds the archive at its end, torch reads its beginning."""
    torch.save(state, path)
    good = path.read_bytes()
    torch.save(state, path, _use_new_zipfile_serialization=False)  # harmless here, but unchecked
    path.write_bytes(path.read_bytes() + good)


def archive(path: Path, state: object, record: bytes = bytes(64), packed: int = zipfile.ZIP_STORED) -> None:
    """Write a checkpoint archive as torch does, with any content."""
    buffer = io.BytesIO()
    if isinstance(state, bytes):
        buffer.write(state)
    else:
        _Pickler(buffer, 2).dump(state)
    with zipfile.ZipFile(path, "w", packed) as file:
        for name, content in (("data.pkl", buffer.getvalue()), ("byteorder", b"little"), ("data/0", record)):
            file.writestr(f"best/{name}", content)
        file.writestr("best/version", "3\n")


def one(tensor: object) -> State:
    """Make the content of a checkpoint whose only parameter is `tensor`."""
    return {"model": {"output.weight": tensor}, "step": 1, "scores": {}}


def _weights(state: State, change: Callable[[torch.Tensor], object]) -> State:
    return state | {"model": {name: change(weight) for name, weight in state["model"].items()}}


# Name of an attack -> function that writes the hostile file, given its path and the content of an honest checkpoint.
ATTACKS: dict[str, Callable[[Path, State], object]] = {
    "pickle": lambda path, state: path.write_bytes(pickle.dumps(Command())),
    "pickle saved by torch": lambda path, state: torch.save(state | {"more": Command()}, path),
    "the old format before an archive": before_an_archive,
    "nothing": lambda path, state: path.write_bytes(b""),
    "half a file": lambda path, state: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a shape beyond the storage": lambda path, state: archive(path, one(Claimed(Storage(16), (10**12,), (1,)))),
    "a bomb": lambda path, state: archive(
        path, one(Claimed(Storage(2**27), (2**27,), (1,))), bytes(2**29), zipfile.ZIP_DEFLATED
    ),
    "a large bytearray": lambda path, state: archive(path, b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R."),
    "other shapes": lambda path, state: torch.save(_weights(state, lambda weight: weight.unsqueeze(0)), path),
    "not a number": lambda path, state: torch.save(_weights(state, lambda weight: weight * torch.nan), path),
}


def _with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _first(header: dict[str, Any]) -> dict[str, Any]:
    """Return the header's entry of the first tensor."""
    entry: dict[str, Any] = next(value for name, value in header.items() if name != "__metadata__")
    return entry


# The same for best.safetensors, the parameters that translate.
WEIGHT_ATTACKS: dict[str, Callable[[Path, State], object]] = {
    **{name: ATTACKS[name] for name in ("pickle", "pickle saved by torch", "nothing", "half a file")},
    "a header beyond the file": lambda path, state: path.write_bytes(struct.pack("<Q", 2**60) + b'{"a": 1}'),
    "no metadata": lambda path, state: _with_header(path, lambda header: header.pop("__metadata__")),
    "a shape beyond the file": lambda path, state: _with_header(
        path, lambda header: _first(header).update(shape=[10**12])
    ),
    "another digest": lambda path, state: _with_header(path, lambda header: header["__metadata__"].update(digest="0")),
    "other shapes": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight.unsqueeze(0))),
    "not a number": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight * torch.nan)),
    "a word for a step": lambda path, state: save_checkpoint(path, state | {"step": "../../x"}),
}
