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


def _script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))


def _twice(path: Path) -> None:
    """A harmless pickle for who reads the last record of a name, a harmful one for who reads the first."""
    archive(path, pickle.dumps({"model": Command()}, 2))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("BEST/data.pkl", pickle.dumps({"model": {}}, 2))


# By name: writes a file at the path, given the content of an honest checkpoint.
ATTACKS: dict[str, Callable[[Path, State], object]] = {
    "pickle": lambda path, state: path.write_bytes(pickle.dumps(Command())),
    "pickle in an archive": lambda path, state: archive(path, state | {"more": Command()} | {"model": {}}),
    "pickle saved by torch": lambda path, state: torch.save(state | {"more": Command()}, path),
    "pickle in the old format": lambda path, state: torch.save(
        state | {"more": Command()}, path, _use_new_zipfile_serialization=False
    ),
    "the old format before an archive": before_an_archive,
    "the old format": lambda path, state: torch.save(state, path, _use_new_zipfile_serialization=False),
    "a script": lambda path, state: _script(path),
    "two pickles": lambda path, state: _twice(path),
    "nothing": lambda path, state: path.write_bytes(b""),
    "safetensors": lambda path, state: (
        save_checkpoint(path.with_suffix(".safetensors"), {"model": state["model"]})
        or path.with_suffix(".safetensors").replace(path)
    ),
    "half a file": lambda path, state: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a count beyond the record": lambda path, state: archive(path, one(Claimed(Storage(10**12), (10**12,), (1,)))),
    "a shape beyond the storage": lambda path, state: archive(path, one(Claimed(Storage(16), (10**12,), (1,)))),
    "an expanded tensor": lambda path, state: archive(path, one(Claimed(Storage(16), (10**12,), (0,)))),
    "an offset beyond": lambda path, state: archive(path, one(Claimed(Storage(16), (4,), (1,), 10**6))),
    "a negative stride": lambda path, state: archive(path, one(Claimed(Storage(16), (4,), (-1,), 3))),
    "a bomb": lambda path, state: archive(
        path, one(Claimed(Storage(2**27), (2**27,), (1,))), bytes(2**29), zipfile.ZIP_DEFLATED
    ),
    "a large memo": lambda path, state: archive(path, b"\x80\x02Nr\xff\xff\xff\x3f."),
    "a large bytearray": lambda path, state: archive(path, b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R."),
    "deep nesting": lambda path, state: archive(path, b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."),
    "thousands of keys": lambda path, state: torch.save(
        state | {"model": state["model"] | {str(number): torch.zeros(1) for number in range(5000)}}, path
    ),
    "whole numbers": lambda path, state: torch.save(_weights(state, lambda weight: weight.long()), path),
    "complex numbers": lambda path, state: torch.save(_weights(state, lambda weight: weight.to(torch.complex64)), path),
    "double precision": lambda path, state: torch.save(_weights(state, lambda weight: weight.double()), path),
    "other shapes": lambda path, state: torch.save(_weights(state, lambda weight: weight.unsqueeze(0)), path),
    "sparse": lambda path, state: torch.save(_weights(state, lambda weight: weight.to_sparse()), path),
    "no memory": lambda path, state: torch.save(_weights(state, lambda weight: weight.to("meta")), path),
    "quantised": lambda path, state: torch.save(
        _weights(state, lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)), path
    ),
    "not a number": lambda path, state: torch.save(_weights(state, lambda weight: weight * torch.nan), path),
    "numbers for weights": lambda path, state: torch.save(_weights(state, lambda weight: 1.0), path),
    "no model": lambda path, state: torch.save({"step": 1, "scores": {}}, path),
    "a list for a model": lambda path, state: torch.save(state | {"model": [1, 2]}, path),
    "a list": lambda path, state: torch.save([state], path),
    "a tensor": lambda path, state: torch.save(torch.zeros(3), path),
    "an ordered dictionary": lambda path, state: torch.save(OrderedDict(state), path),
    "a word for a step": lambda path, state: torch.save(state | {"step": "../../x"}, path),
    "words for scores": lambda path, state: torch.save(state | {"scores": {"bleu": "%s" * 9}}, path),
    "a dictionary for a score": lambda path, state: torch.save(state | {"scores": {"bleu": {}}}, path),
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


def _values(header: dict[str, Any], **changes: object) -> None:
    metadata = header["__metadata__"]
    metadata["nmt"] = json.dumps(json.loads(metadata["nmt"]) | changes)


# The same for the weights of a validation.
WEIGHT_ATTACKS: dict[str, Callable[[Path, State], object]] = {
    "pickle": ATTACKS["pickle"],
    "pickle saved by torch": ATTACKS["pickle saved by torch"],
    "torch's format": lambda path, state: torch.save(state, path),
    "nothing": ATTACKS["nothing"],
    "half a file": ATTACKS["half a file"],
    "a header beyond the file": lambda path, state: path.write_bytes(struct.pack("<Q", 2**60) + b'{"a": 1}'),
    "no header": lambda path, state: path.write_bytes(struct.pack("<Q", 2) + b"{}"),
    "a header of words": lambda path, state: path.write_bytes(struct.pack("<Q", 5) + b"words"),
    "deep nesting": lambda path, state: path.write_bytes(struct.pack("<Q", 10**5) + b"[" * 10**5),
    "no metadata": lambda path, state: _with_header(path, lambda header: header.pop("__metadata__")),
    "a shape beyond the file": lambda path, state: _with_header(
        path, lambda header: _first(header).update(shape=[10**12])
    ),
    "offsets beyond the file": lambda path, state: _with_header(
        path, lambda header: _first(header).update(data_offsets=[0, 10**12])
    ),
    "another type": lambda path, state: _with_header(path, lambda header: _first(header).update(dtype="I32")),
    "another digest": lambda path, state: _with_header(path, lambda header: header["__metadata__"].update(digest="0")),
    "another step": lambda path, state: _with_header(path, lambda header: _values(header, step=7)),
    "thousands of keys": lambda path, state: save_checkpoint(
        path, state | {"model": state["model"] | {str(number): torch.zeros(1) for number in range(5000)}}
    ),
    "whole numbers": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight.long())),
    "double precision": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight.double())),
    "other shapes": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight.unsqueeze(0))),
    "not a number": lambda path, state: save_checkpoint(path, _weights(state, lambda weight: weight * torch.nan)),
    "no weights": lambda path, state: save_checkpoint(path, state | {"model": {}}),
    "a word for a step": lambda path, state: save_checkpoint(path, state | {"step": "../../x"}),
    "words for scores": lambda path, state: save_checkpoint(path, state | {"scores": {"bleu": "%s" * 9}}),
    "a dictionary for a score": lambda path, state: save_checkpoint(path, state | {"scores": {"bleu": {}}}),
}
