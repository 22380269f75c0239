"""Files that are whole or not there at all."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, write: Callable[[BinaryIO], object] | bytes) -> None:
    """Write beside the path, force it to the disk, then rename: a kill leaves the old file or the new one.

    `write` is the content or a function that writes it. `remove_leftovers` finds what a kill leaves half-written.
    Raises OSError naming the path, such as for a full disk, whatever a library makes of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            if isinstance(write, bytes):
                file.write(write)
            else:
                write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        cause = _system_error(error)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the renaming itself
    finally:
        os.close(directory)


def _system_error(error: BaseException | None) -> OSError | None:
    """The system's error behind another one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def remove_leftovers(directory: Path) -> None:
    """Delete what killed writers left half-written in a directory and below. Only where no other process writes."""
    for leftover in directory.rglob(".*.part"):
        leftover.unlink(missing_ok=True)


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON text; numbers that JSON does not have (infinity, not a number) become null."""
    return json.dumps(_finite(values), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
