"""The cache of prepared corpora: its locks, and what killed preparations left in it."""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from nmt.data.prepare.first_pass import FIRST_PASS
from nmt.system.files import try_lock

log = logging.getLogger(__name__)

KEPT = 7 * 24 * 3600  # seconds that a killed preparation is kept to be continued


def working_directory(directory: Path) -> Path:
    """Where a corpus is prepared, beside its directory."""
    return directory.with_name(f".{directory.name}.part")


def can_continue(working: Path) -> bool:
    """Did the preparation in this directory end after its first pass?"""
    return (working / FIRST_PASS).is_file()


def remove_stale_preparations(directory: Path) -> None:
    """Delete what killed processes left half-prepared: of this corpus, whose lock we hold, and of unlocked ones.

    A preparation that can be continued is kept: of this corpus, and for a week of others.
    """
    for leftover in directory.parent.glob(".*.part"):
        name = leftover.name.split(".")[1]
        own = name == directory.name
        lock = nullcontext(True) if own else _locked_at_once(directory.with_name(f".{name}.lock"))
        with lock as ours, suppress(FileNotFoundError):  # its owner may have finished it meanwhile
            if not ours:
                continue
            recent = own or time.time() - leftover.stat().st_mtime < KEPT
            if not (recent and leftover.name == f".{name}.part" and can_continue(leftover)):
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked_at_once(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock, unless another process holds it: then the value is False. A link counts as locked."""
    ours = False
    with ExitStack() as files:
        with suppress(OSError):
            lock = files.enter_context(open(_open_lock(path), "rb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        try:
            yield ours
        finally:
            if ours:
                path.unlink(missing_ok=True)


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock: the jobs of a sweep wait until the first one has prepared their corpus."""
    while True:
        with open(_open_lock(path), "rb") as lock:  # closing it releases the lock, also after a kill
            if not try_lock(lock.fileno(), path):
                log.info("corpus: another process is preparing it, waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    continue
            except FileNotFoundError:
                continue  # the previous owner has deleted the file that we locked
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _open_lock(path: Path) -> int:
    """Open the lock file, which may belong to another user, without following a link."""
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)  # NFS locks only writable files
    except PermissionError as error:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise error from None
