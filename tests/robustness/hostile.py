"""Checkpoints that somebody made to do harm, or that merely are none of the run's."""

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

MARK = "executed"  # a folder that code in a file would make
State = dict[str, Any]


class Command:
    """A pickle of this makes the folder when it is read with pickle.load."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (MARK,)


class Storage:
    """Stands for a record of the archive and the number of numbers that it is said to have."""

    def __init__(self, count: int) -> None:
        self.count = count


class Claimed:
    """A tensor with these sizes over a storage."""

    def __init__(self, storage: Storage, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
        self.parts = (storage, offset, shape, stride, False, OrderedDict())

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return torch._utils._rebuild_tensor_v2, self.parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: object) -> tuple[object, ...] | None:
        return ("storage", torch.FloatStorage, "0", "cpu", thing.count) if isinstance(thing, Storage) else None


def before_an_archive(path: Path, state: State) -> None:
    """zipfile finds the archive at the end, torch reads what stands at the beginning."""
    torch.save(state, path)
    good = path.read_bytes()
    torch.save(state, path, _use_new_zipfile_serialization=False)  # harmless, but nobody looked
    path.write_bytes(path.read_bytes() + good)


def archive(path: Path, state: object, record: bytes = bytes(64), packed: int = zipfile.ZIP_STORED) -> None:
    """As torch writes it, but for what is in it."""
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
    """A checkpoint with this for a weight."""
    return {"model": {"output.weight": tensor}, "step": 1, "scores": {}}


def _weights(state: State, change: Callable[[torch.Tensor], object]) -> State:
    return state | {"model": {name: change(weight) for name, weight in state["model"].items()}}


# By name: writes a file at the path, given the content of an honest checkpoint.
ATTACKS: dict[str, Callable[[Path, State], object]] = {
    "pickle": lambda path, state: path.write_bytes(pickle.dumps(Command())),
    "pickle saved by torch": lambda path, state: torch.save(state | {"more": Command()}, path),
    "the old format before an archive": before_an_archive,
    "nothing": lambda path, state: path.write_bytes(b""),
    "safetensors": lambda path, state: (
        save_checkpoint(path.with_suffix(".safetensors"), {"model": state["model"]})
        or path.with_suffix(".safetensors").replace(path)
    ),
    "half a file": lambda path, state: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a shape beyond the storage": lambda path, state: archive(path, one(Claimed(Storage(16), (10**12,), (1,)))),
    "a bomb": lambda path, state: archive(
        path, one(Claimed(Storage(2**27), (2**27,), (1,))), bytes(2**29), zipfile.ZIP_DEFLATED
    ),
    "a large bytearray": lambda path, state: archive(path, b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R."),
    "other shapes": lambda path, state: torch.save(_weights(state, lambda weight: weight.unsqueeze(0)), path),
    "not a number": lambda path, state: torch.save(_weights(state, lambda weight: weight * torch.nan), path),
    "no model": lambda path, state: torch.save({"step": 1, "scores": {}}, path),
    "a list": lambda path, state: torch.save([state], path),
    "a word for a step": lambda path, state: torch.save(state | {"step": "../../x"}, path),
}


def _with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _first(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the first tensor."""
    entry: dict[str, Any] = next(value for name, value in header.items() if name != "__metadata__")
    return entry


# The same for the weights of a validation.
WEIGHT_ATTACKS: dict[str, Callable[[Path, State], object]] = {
    "pickle": ATTACKS["pickle"],
    "pickle saved by torch": ATTACKS["pickle saved by torch"],
    "torch's format": lambda path, state: torch.save(state, path),
    "nothing": ATTACKS["nothing"],
    "half a file": ATTACKS["half a file"],
    "a header beyond the file": lambda path, state: path.write_bytes(struct.pack("<Q", 2**60) + b'{"a": 1}'),
    "deep nesting": lambda path, state: path.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
    "no metadata": lambda path, state: _with_header(path, lambda header: header.pop("__metadata__")),
    "a shape beyond the file": lambda path, state: _with_header(
        path, lambda header: _first(header).update(shape=[10**12])
    ),
    "another digest": lambda path, state: _with_header(path, lambda header: header["__metadata__"].update(digest="0")),
    "other shapes": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight.unsqueeze(0))),
    "not a number": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight * torch.nan)),
    "a word for a step": lambda path, state: save_checkpoint(path, state | {"step": "../../x"}),
    "a dictionary for a score": lambda path, state: save_checkpoint(path, state | {"scores": {"bleu": {}}}),
}
