"""Prepare a corpus once: read and filter it, train the tokenizers, encode it, and keep the result by its content.

Preparation makes two passes over each split and writes to a working folder, CACHE/.FINGERPRINT.part:

1. `first_pass.py` reads the user's files, drops unusable pairs, writes the others to SPLIT.raw, and trains *.model on a
   sample of their lines. first_pass.json says that this pass is complete.
2. `encoding.py` encodes the usable pairs chunk by chunk, drops training pairs by length, and appends to SPLIT.SIDE.ids,
   .txt, .lengths, .bytes and SPLIT.alignments. journal.jsonl has an entry for each chunk, so that a preparation that
   was killed continues after its last chunk.

Then lengths become offsets (.offsets.npy, .lines.npy), report.json and checksums.json are written, what only the passes
needed is deleted, and the folder is renamed to CACHE/FINGERPRINT, which `prepared.py` opens.
"""

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data import corpus, demo
from nmt.data.corpus import Pair, locate
from nmt.data.encoding import JOURNAL, MAX_HELD_OUT, EncodedSplit, Encoder, read_journal, write_journal
from nmt.data.first_pass import FIRST_PASS, FirstPass, read_corpus
from nmt.data.prepared import FORMAT, Prepared, recall, remember, state_of, write_checksums
from nmt.data.tokenizer import Tokenizers, check_sampling
from nmt.system.files import named_errors, try_lock, write_atomically
from nmt.system.processes import Workers

log = logging.getLogger(__name__)

THREADS = 4  # that hash files
KEPT = 7 * 24 * 3600  # seconds that a killed preparation is kept to be continued
_NOT_IN_FINGERPRINT: Any = {  # paths, and what does not change the prepared corpus
    **dict.fromkeys(("cache_dir", "workers", "train", "validation", "test", "path", "extra"), True),
    "corpora": {"__all__": {"train", "validation", "test"}},
}
Report = dict[str, Any]


def prepare(data: schema.Data, tokenizer: schema.TokenizerConfig) -> Prepared:
    """Prepare a corpus, or open it in the cache if this content was prepared before. Raises UserError."""
    fingerprint = fingerprint_of(data, tokenizer)
    directory = _directory(data, fingerprint)
    prepared = _from_cache(directory, warn=False)
    if prepared is not None:
        log.info("corpus: prepared before, %s", directory)
        if isinstance(tokenizer, schema.FileTokenizer):
            check_sampling(tokenizer, prepared.tokenizers)  # which is not part of the fingerprint
        return prepared
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir={data.cache_dir}: cannot create this directory ({error.strerror})") from None
    with _locked(directory.with_name(f".{directory.name}.lock")):
        prepared = _from_cache(directory, warn=True)  # another process may have prepared it meanwhile
        if prepared is None:
            _remove_stale_preparations(directory)
            if directory.exists():  # damaged
                shutil.rmtree(directory)
            working = directory.with_name(f".{directory.name}.part")
            try:
                with named_errors(directory.parent):
                    working.mkdir(exist_ok=True)
                    _prepare(data, tokenizer, fingerprint, working)
                    working.rename(directory)  # all or nothing
            except BaseException as error:
                if isinstance(error, Exception) or not _can_continue(working):  # after Ctrl-C, the next start continues
                    shutil.rmtree(working, ignore_errors=True)
                raise
            prepared = Prepared(directory)
    return prepared


def is_prepared(data: schema.Data, fingerprint: str) -> bool:
    """Is the corpus with this fingerprint in the cache?"""
    return _from_cache(_directory(data, fingerprint), warn=False) is not None


def _directory(data: schema.Data, fingerprint: str) -> Path:
    return user_path(data.cache_dir) / fingerprint[:24]


def _from_cache(directory: Path, *, warn: bool) -> Prepared | None:
    """Open the prepared corpus; None if it does not exist or is damaged."""
    if not (directory / "report.json").exists():
        return None
    try:
        return Prepared(directory)
    except UserError as error:
        if warn:
            log.warning("corpus: %s; preparing it again", str(error).partition("; delete the folder")[0])
        return None


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """Compute the SHA-256 of all that determines a prepared corpus: settings and file contents, but not paths."""
    settings = {
        "format": FORMAT,
        "demo": demo.VERSION if data.kind == "demo" else None,
        "data": data.model_dump(exclude=_NOT_IN_FINGERPRINT),
        "extra": len(data.extra),
        "splits": sorted(corpus.splits(data)) if data.kind != "demo" else None,
        "parts": [len(part) for part in corpus.files_by_part(data)],
        "tokenizer": tokenizer.model_dump(exclude={"sampling", "sampling_sides", "source_model", "target_model"}),
    }
    structure = corpus.file_counts(data)
    if any(isinstance(split, list) for split in structure.values()):
        settings["structure"] = structure  # where a split of several files ends
    models = []
    if isinstance(tokenizer, schema.FileTokenizer):
        models = [user_path(name) for name in (tokenizer.source_model, tokenizer.target_model) if name]
    start = json.dumps(settings, sort_keys=True).encode()
    return _digest_of_files([*corpus.files(data), *models], start, user_path(data.cache_dir))


def _digest_of_files(paths: Sequence[Path], start: bytes = b"", states: Path | None = None) -> str:
    """Compute the SHA-256 of files; those of large ones are remembered in the folder `states`."""
    digest = hashlib.sha256(start)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the interpreter's lock
        for value in pool.map(partial(_digest_of_file, states=states), paths):
            digest.update(bytes.fromhex(value))
    return digest.hexdigest()


def _digest_of_file(path: Path, states: Path | None) -> str:
    try:
        state, key = state_of([path]) if states else None, f"SHA-256 {path.resolve()}"
        value = recall(states, key, state) if states else None
        if value is None:
            with path.open("rb") as file:
                value = hashlib.file_digest(file, "sha256").hexdigest()
            if states:
                remember(states, key, state, value)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return value


def _prepare(data: schema.Data, tokenizer: schema.TokenizerConfig, fingerprint: str, working: Path) -> None:
    splits = corpus.splits(data)
    with Workers(data.workers, "data.workers") as workers:
        journal = read_journal(working)
        first = FirstPass.load(working)
        if first is None:
            first = read_corpus(data, tokenizer, splits, working, workers)
        else:
            log.info("corpus: continues a preparation that was killed, %s", working)
        encoded = {name: EncodedSplit(working, name, journal.get(name, ())) for name in splits}
        write_journal(working, encoded.values())
        for name, split in encoded.items():
            encoder = Encoder(name, first.usable[name].path, tokenizer.lowercase, data)
            for chunk in split.encode(first.usable[name], encoder, workers):
                if chunk.too_long is not None:
                    index, tokens = chunk.too_long
                    raise _too_long(splits[name], sum(entry["kept"] for entry in split.entries) + index, tokens)
    reports = {name: split.report(first.usable[name].counts) | first.matches[name] for name, split in encoded.items()}
    train = reports["train"]
    if not train["kept"]:
        raise UserError(
            f"data: the filters drop all {train['read']} training pairs (data.max_length={data.max_length}, "
            f"data.max_ratio={data.max_ratio}; pairs dropped by each filter: {train['dropped']})"
        )
    first.delete(working)
    for split in encoded.values():
        split.finish()
    (working / JOURNAL).unlink()
    report: Report = {
        "fingerprint": fingerprint,
        "format": FORMAT,
        "languages": [data.source_lang, data.target_lang],
        "lowercase": tokenizer.lowercase,
        "vocabulary": [side.vocab_size for side in Tokenizers.load(working, tokenizer.lowercase)],
        "splits": reports,
        "warnings": first.warnings,
        # What a model is trained on: tokenizers, token ids and word alignments.
        "content": _digest_of_files(
            sorted([*working.glob("*.model"), *working.glob("*.ids"), *working.glob("train.alignments")])
        ),
    }
    write_atomically(working / "report.json", json.dumps(report, indent=2).encode())
    write_checksums(working)


def _too_long(pairs: Iterable[Pair], index: int, tokens: int) -> UserError:
    """Name the line of the pair that is too long. index: among the valid pairs of a held-out split, from 0."""
    valid = (number for number, pair in enumerate(pairs, 1) if None not in (pair.source, pair.target))
    (number,) = itertools.islice(valid, index, index + 1)
    return UserError(
        f"{locate(pairs, [number])}: has {tokens} tokens, more than the {MAX_HELD_OUT} allowed in a held-out sentence; "
        "shorten the pair or remove it"
    )


# The cache: its locks, and what killed preparations left in it


def _can_continue(working: Path) -> bool:
    """Did the preparation in this directory end after its first pass?"""
    return (working / FIRST_PASS).is_file()


def _remove_stale_preparations(directory: Path) -> None:
    """Delete what killed processes left half-prepared: of this corpus, whose lock we hold, and of unlocked ones.

    A preparation that can be continued is kept: of this corpus, and for a week of others.
    """
    for leftover in directory.parent.glob(".*.part"):
        name = leftover.name.split(".")[1]
        is_this = name == directory.name
        lock = nullcontext(True) if is_this else _locked_at_once(directory.with_name(f".{name}.lock"))
        with lock as free, suppress(FileNotFoundError):  # its owner may have finished it meanwhile
            if not free:
                continue
            recent = is_this or time.time() - leftover.stat().st_mtime < KEPT
            if not (recent and leftover.name == f".{name}.part" and _can_continue(leftover)):
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
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


@contextmanager
def _locked_at_once(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock, unless another process holds it: then the value is False. A link counts as locked."""
    free = False
    with ExitStack() as files:
        with suppress(OSError):
            lock = files.enter_context(open(_open_lock(path), "rb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        try:
            yield free
        finally:
            if free:
                path.unlink(missing_ok=True)


def _open_lock(path: Path) -> int:
    """Open the lock file, which may belong to another user, without following a link."""
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)  # NFS locks only writable files
    except PermissionError as error:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise error from None
