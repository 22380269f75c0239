"""Prepares a corpus once: reads and filters it, trains the tokenizers, encodes it, and keeps the result in a cache.

Two passes over the corpus (`raw.py`, `encoding.py`) write to a working folder, CACHE/.FINGERPRINT.part. When the folder
is complete, it is renamed to CACHE/FINGERPRINT, which `prepared.py` opens. A preparation that was killed starts from
the beginning.
"""

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError, user_path
from nmt.config.schema import data as schema
from nmt.data import corpus
from nmt.data.encoding import encode_split
from nmt.data.prepared import FORMAT, Prepared
from nmt.data.raw import compare_splits, read_splits, tokenizer_lines
from nmt.data.tokenizer import check_sampling, make_tokenizers
from nmt.system.files import named_errors, try_lock, write_atomically
from nmt.system.processes import Workers

log = logging.getLogger(__name__)

THREADS = 4  # threads that hash files
# Keys of `data` that do not change the prepared corpus. Instead of paths, the fingerprint takes the files' contents.
_NOT_IN_FINGERPRINT: Any = {
    **dict.fromkeys(("cache_dir", "workers", "train", "validation", "test", "path", "extra"), True),
    "corpora": {"__all__": {"train", "validation", "test"}},
}
_TOKENIZER_NOT_IN_FINGERPRINT: Any = {
    **dict.fromkeys(("sampling", "source_model", "target_model"), True),
    "source": {"sampling"},
    "target": {"sampling"},
}


def prepare(data: schema.Data, tokenizer: schema.TokenizerConfig) -> Prepared:
    """Open the prepared corpus in the cache; prepare it first if the cache lacks it. Raises UserError."""
    fingerprint = fingerprint_of(data, tokenizer)
    directory = _directory(data, fingerprint)
    prepared = _from_cache(directory)
    if prepared is not None:
        log.info("corpus: prepared before, %s", directory)
        if isinstance(tokenizer, schema.FileTokenizer):
            check_sampling(tokenizer, prepared.tokenizers)  # the cached corpus does not depend on `sampling`
        return prepared
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir={data.cache_dir}: cannot create this directory ({error.strerror})") from None
    with _locked(directory.with_name(f".{directory.name}.lock")):
        prepared = _from_cache(directory)  # another process may have prepared it meanwhile
        if prepared is None:
            if directory.exists():
                log.warning("corpus: %s is incomplete; preparing it again", directory)
                shutil.rmtree(directory)
            working = directory.with_name(f".{directory.name}.part")
            shutil.rmtree(working, ignore_errors=True)  # left by a preparation that was killed
            try:
                with named_errors(directory.parent):
                    working.mkdir()
                    _prepare(data, tokenizer, fingerprint, working)
                    working.rename(directory)  # only now, so that the cache never holds an incomplete corpus
            finally:
                shutil.rmtree(working, ignore_errors=True)
            prepared = Prepared(directory)
    return prepared


def is_prepared(data: schema.Data, fingerprint: str) -> bool:
    """Check whether the cache holds the corpus with this fingerprint."""
    return _from_cache(_directory(data, fingerprint)) is not None


def _directory(data: schema.Data, fingerprint: str) -> Path:
    return user_path(data.cache_dir) / fingerprint[:24]


def _from_cache(directory: Path) -> Prepared | None:
    """Open the prepared corpus. Returns None if it does not exist or is incomplete."""
    try:
        return Prepared(directory)
    except UserError:
        return None


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """Compute the SHA-256 of all that determines a prepared corpus: settings and file contents, but not paths."""
    splits = corpus.splits(data)
    settings = {
        "format": FORMAT,
        "data": data.model_dump(exclude=_NOT_IN_FINGERPRINT),
        "splits": {name: [(source.tag, len(source.files)) for source in split] for name, split in splits.items()},
        "tokenizer": tokenizer.model_dump(exclude=_TOKENIZER_NOT_IN_FINGERPRINT),
    }
    models = []
    if isinstance(tokenizer, schema.FileTokenizer):
        models = [user_path(name) for name in (tokenizer.source_model, tokenizer.target_model) if name]
    files = [path for split in splits.values() for source in split for path in source.files]
    return _digest_of_files([*files, *models], json.dumps(settings, sort_keys=True).encode())


def _digest_of_files(paths: Sequence[Path], start: bytes = b"") -> str:
    """Compute the SHA-256 of `start`, followed by the SHA-256 of each file."""
    digest = hashlib.sha256(start)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing releases the interpreter's lock
        for value in pool.map(_digest_of_file, paths):
            digest.update(value)
    return digest.hexdigest()


def _digest_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _prepare(data: schema.Data, tokenizer: schema.TokenizerConfig, fingerprint: str, working: Path) -> None:
    splits = corpus.splits(data)
    with Workers(data.workers, "data.workers") as workers:
        raw = read_splits(splits, working, tokenizer.lowercase, workers)
        overlaps, warnings = compare_splits(raw, splits)
        log.info("tokenizer: %s", tokenizer.kind)
        source_lines, target_lines = tokenizer_lines(raw["train"], tokenizer)
        tokenizers = make_tokenizers(tokenizer, source_lines, target_lines, data.tags)
        tokenizers.save(working)
        reports = {
            name: encode_split(name, raw[name], sources, working, tokenizer.lowercase, data, workers) | overlaps[name]
            for name, sources in splits.items()
        }
    train = reports["train"]
    if not train["kept"]:
        raise UserError(
            f"data: the filters drop all {train['read']} training pairs (data.max_length={data.max_length}, "
            f"data.max_ratio={data.max_ratio}; pairs dropped by each filter: {train['dropped']})"
        )
    for path in working.glob("*.raw"):
        path.unlink()
    report = {
        "fingerprint": fingerprint,
        "languages": [data.source_lang, data.target_lang],
        "lowercase": tokenizer.lowercase,
        "vocabulary": [side.vocab_size for side in tokenizers],
        "splits": reports,
        "warnings": warnings,
        # The digest of the tokenizers, the token ids of all splits, and the word alignments of train. A run cannot be
        # resumed with a corpus of another digest.
        "content": _digest_of_files(
            sorted([*working.glob("*.model"), *working.glob("*.ids"), *working.glob("train.alignments")])
        ),
    }
    write_atomically(working / "report.json", json.dumps(report, indent=2).encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that the jobs of a sweep wait until one of them has prepared the corpus."""
    with path.open("ab") as lock:  # the file stays; closing it releases the lock, also if the process is killed
        if not try_lock(lock.fileno(), path):
            log.info("corpus: another process is preparing it, waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
