"""Results of reading large files, remembered as long as the files do not change."""

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.system.files import read_bytes, write_atomically

LARGE = 2**28  # bytes; what can be read in a moment is not remembered
RECENT = 0.1  # seconds after a change in which the clock of some file systems does not show another change
MAX_ENTRIES = 1000

State = list[list[Any]]
_lock = threading.Lock()


def state_of(paths: Iterable[Path]) -> State | None:
    """What changes whenever one of these files does; None if they are small or were changed a moment ago.

    It includes the time of the last change of the inode, which only the system sets.
    """
    statuses = [(str(path), path.stat()) for path in sorted(paths)]
    if sum(status.st_size for _, status in statuses) < LARGE:
        return None
    if max(status.st_ctime for _, status in statuses) > time.time() - RECENT:
        return None
    return [
        [name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
        for name, status in statuses
    ]


def recall(folder: Path, key: str, state: State | None) -> str | None:
    """What was remembered in this folder for files in this state, by this user."""
    if state is None:
        return None
    entry = _read(folder).get(key)
    return str(entry["value"]) if isinstance(entry, dict) and entry.get("state") == state else None


def remember(folder: Path, key: str, state: State | None, value: str) -> None:
    """Remember a value that was computed while the files were in this state; not if the folder cannot be written."""
    if state is None:
        return
    with _lock, suppress(OSError):
        entries = _read(folder)
        entries.pop(key, None)
        entries[key] = {"state": state, "value": value}
        latest = dict(list(entries.items())[-MAX_ENTRIES:])
        write_atomically(_path(folder), json.dumps(latest).encode())


def _path(folder: Path) -> Path:
    return folder / f".states.{os.getuid()}.json"


def _read(folder: Path) -> dict[str, Any]:
    path = _path(folder)
    try:
        if path.lstat().st_uid != os.getuid():
            return {}
        entries = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}
