"""Checkpoint files: safetensors for the weights of a validation, torch's format for the full state of training.

Loading either executes no code of the file and allocates memory only in proportion to the file's size.
"""

import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from nmt.system.files import raise_system_error, read_bytes, write_atomically
from nmt.system.machine import is_out_of_memory

BEST, LAST = "best.safetensors", "last.pt"  # of the best validation; to resume from
METADATA = "nmt"  # the key under which a safetensors file holds all that is not a tensor, as JSON
MAX_METADATA = 2**20  # bytes
MAX_WEIGHTS = 2**36  # bytes


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: as .safetensors {"model": weights, and values for JSON}, as .pt any state."""
    if path.suffix == Path(BEST).suffix:
        write_atomically(path, to_safetensors(state))
    else:
        write_atomically(path, lambda file: torch.save(state, file))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What save_checkpoint wrote. Raises ValueError for anything else or a flipped bit, OSError if the system fails."""
    try:
        state = _from_safetensors(path) if path.suffix == Path(BEST).suffix else _from_torch(path)
    except Exception as error:  # a damaged file can raise nearly anything
        raise_system_error(error)
        if is_out_of_memory(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None
        raise ValueError(f"not a checkpoint ({error})") from None
    if type(state) is not dict:
        raise ValueError("not a checkpoint (no dictionary)")
    return state


def to_safetensors(state: Mapping[str, Any]) -> bytes:
    """Tied weights are stored once; the metadata names their aliases, and a digest that detects flipped bits."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    for name, weight in state["model"].items():
        owner = first.setdefault((weight.data_ptr(), weight.shape), name)
        if owner == name:
            tensors[name] = weight.detach().cpu().contiguous()
        else:
            aliases[name] = owner
    values = {key: value for key, value in state.items() if key != "model"} | {"aliases": aliases}
    text = json.dumps(values, sort_keys=True)
    return save_safetensors(tensors, {METADATA: text, "digest": _digest(text, tensors)})


def _from_safetensors(path: Path) -> dict[str, Any]:
    content = read_bytes(path, MAX_WEIGHTS)
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + min(length, MAX_METADATA)])["__metadata__"]
    tensors = load_safetensors(content)
    if metadata["digest"] != _digest(metadata[METADATA], tensors):
        raise ValueError("the digest differs")
    values = json.loads(metadata[METADATA])
    aliases = {name: tensors[owner] for name, owner in values.pop("aliases").items()}
    return {"model": tensors | aliases, **values}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def _from_torch(path: Path) -> Any:  # noqa: ANN401
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        # A few compressed bytes could become gigabytes, and records could overlap.
        packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if packed or sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("compressed or overlapping records")
        if min(record.header_offset for record in records):
            raise ValueError("data before the archive")
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of {damaged} differs")
        if any(b"bytearray" in archive.read(record) for record in records if record.filename.endswith(".pkl")):
            raise ValueError("a bytearray")  # torch.load would allocate any size that one claims
    return torch.load(path, map_location="cpu", weights_only=True)
