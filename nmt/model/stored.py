"""Checkpoints read as data, from whomever they are: nothing in them is executed, and no more memory is taken than the
file has bytes."""

import errno
import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from nmt.files import raise_system_error
from nmt.machine import is_out_of_memory

ZIP = b"PK\x03\x04"
LARGEST_PICKLE = 2**26  # bytes: of all but the numbers in the tensors, of which each is a file in the archive
PROTOCOL = 2  # of the pickles that torch writes; later ones know operations that take memory before they read
STORAGES = {  # bytes of a number, by the kinds of tensors that checkpoints hold
    ("torch", "FloatStorage"): 4,
    ("torch", "DoubleStorage"): 8,
    ("torch", "LongStorage"): 8,
    ("torch", "IntStorage"): 4,
    ("torch", "ByteStorage"): 1,
    ("torch", "BoolStorage"): 1,
}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What torch.save wrote of a dictionary of tensors and plain values. Raises ValueError for anything else,
    OSError if the system is at fault."""
    try:
        with path.open("rb") as file:
            if file.read(len(ZIP)) != ZIP:  # torch would read what stands before the archive
                raise ValueError("no archive")
        with zipfile.ZipFile(path) as archive:
            _Inspector(archive, path.stat().st_size).load()
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of {damaged} differs")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can raise nearly anything
        raise_system_error(error)
        if is_out_of_memory(error):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from None
        raise ValueError(f"not a checkpoint ({error})") from None
    if type(state) is not dict:
        raise ValueError("not a checkpoint (no dictionary)")
    return state


class _Inspector(pickle.Unpickler):
    """Goes through a checkpoint's pickle and makes none of its tensors: raises something unless each of them is dense,
    within its own numbers, and these within the file."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        records = archive.infolist()
        self.root = records[0].filename.split("/")[0]
        self.sizes = {record.filename: record.file_size for record in records}
        if min(record.header_offset for record in records):
            raise ValueError("something before the archive")
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("compressed")  # a few bytes could become any number
        if sum(self.sizes.values()) > size or len({name.lower() for name in self.sizes}) < len(records):
            raise ValueError("overlapping records")
        name = f"{self.root}/data.pkl"
        if self.sizes[name] > LARGEST_PICKLE:
            raise ValueError("too many values")
        with archive.open(name) as file:
            for operation, argument, _ in pickletools.genops(file.read()):
                beyond = operation.name == "LONG_BINPUT" and int(argument or 0) > self.sizes[name]
                if operation.proto > PROTOCOL or beyond:
                    raise ValueError(f"{operation.name} in the pickle")
        super().__init__(archive.open(name))

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        """The few names in a checkpoint, none of which does anything."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _check_tensor
        return STORAGES[module, name]

    def persistent_load(self, pid: tuple[str, int, str, str, int]) -> int:
        """How many numbers a tensor's storage has."""
        _, item, key, _, count = pid
        if self.sizes[f"{self.root}/data/{key}"] != item * count:
            raise ValueError("a storage of another size")
        return count


def _check_tensor(
    count: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], grad: bool, hooks: dict[str, Any]
) -> None:
    """Of as many numbers as it names, all among the `count` of its storage: none is expanded."""
    if min(offset, *shape, *stride, 0) < 0 or hooks or grad:
        raise ValueError("not a plain tensor")
    elements, last = 1, offset
    for size, step in zip(shape, stride, strict=True):
        elements, last = elements * size, last + (size - 1) * step
    if elements > count or (elements and last >= count):
        raise ValueError("a tensor beyond its storage")
