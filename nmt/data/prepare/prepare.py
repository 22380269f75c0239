"""Prepare a corpus: filter it, train the tokenizer, encode, write a report. Equal content is prepared only once."""

import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data.demo import corpus as demo
from nmt.data.prepare.cache import can_continue, lock_file, remove_stale_preparations, working_directory
from nmt.data.prepare.encoding import JOURNAL, MAX_HELD_OUT, EncodedSplit, Encoder, read_journal, write_journal
from nmt.data.prepare.file_states import recall, remember, state_of
from nmt.data.prepare.first_pass import FirstPass, read_corpus
from nmt.data.prepare.tokenizer_training import check_sampling
from nmt.data.prepare.workers import Workers
from nmt.data.prepared import FORMAT, Prepared, write_checksums
from nmt.data.reading import corpus
from nmt.data.reading.sources import Pair, locate
from nmt.data.tokenizer import Tokenizers
from nmt.system.files import named_errors, write_atomically

log = logging.getLogger(__name__)

THREADS = 4  # that hash files
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
    with lock_file(directory.with_name(f".{directory.name}.lock")):
        prepared = _from_cache(directory, warn=True)  # another process may have prepared it meanwhile
        if prepared is None:
            remove_stale_preparations(directory)
            if directory.exists():  # damaged
                shutil.rmtree(directory)
            working = working_directory(directory)
            try:
                with named_errors(directory.parent):
                    working.mkdir(exist_ok=True)
                    _prepare(data, tokenizer, fingerprint, working)
                    working.rename(directory)  # all or nothing
            except BaseException as error:
                if isinstance(error, Exception) or not can_continue(working):  # after Ctrl-C, the next start continues
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
    """The prepared corpus; None if it does not exist or is damaged."""
    if not (directory / "report.json").exists():
        return None
    try:
        return Prepared(directory)
    except UserError as error:
        if warn:
            log.warning("corpus: %s; preparing it again", str(error).partition("; delete the folder")[0])
        return None


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """SHA-256 of everything that determines a prepared corpus: settings and file contents, but not paths."""
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
    """SHA-256 of files; those of large ones are remembered in the folder `states`."""
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
    with Workers(data.workers) as workers:
        journal = read_journal(working)
        first = FirstPass.load(working)
        if first is None:
            first = read_corpus(data, tokenizer, splits, working, workers)
        else:
            log.info("corpus: continues a preparation that was killed, %s", working)
        tokenizers = Tokenizers.load(working, tokenizer.lowercase)
        encoded = {name: EncodedSplit(working, name, journal.get(name, ())) for name in splits}
        write_journal(working, encoded.values())
        for name, split in encoded.items():
            encoder = Encoder(name, first.usable[name].path, tokenizers, data)
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
        "vocabulary": [side.vocab_size for side in tokenizers],
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
    """index: of a valid pair of a held-out split, from 0."""
    valid = (number for number, pair in enumerate(pairs, 1) if None not in (pair.source, pair.target))
    (number,) = itertools.islice(valid, index, index + 1)
    return UserError(
        f"{locate(pairs, [number])}: has {tokens} tokens, more than the {MAX_HELD_OUT} allowed in a held-out sentence; "
        "shorten the pair or remove it"
    )
