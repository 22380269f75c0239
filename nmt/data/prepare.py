"""From a corpus as the user keeps it to a prepared directory, once per content: filter, tokenizer, ids, report."""

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.paths import user_path
from nmt.data import corpus
from nmt.data.corpus import Pair
from nmt.data.corpus_warnings import Overlap, corpus_warnings, counted
from nmt.data.demo import corpus as demo
from nmt.data.prepared import FORMAT, AlignmentWriter, Prepared, Raw, Row, SideWriter, write_checksums
from nmt.data.tokenizer import Tokenizers
from nmt.data.tokenizer_training import check_sampling, make_tokenizers
from nmt.files import named_errors, write_atomically

log = logging.getLogger(__name__)

CHUNK = 10_000  # pairs encoded at a time, ...
CHARACTERS = 5_000_000  # ... or fewer that have so many characters
LONGEST_HELD_OUT = 5_000  # tokens of a sentence: its attention and that of its batch mates must fit memory
Report = dict[str, Any]


def prepare(data: schema.Data, tokenizer: schema.TokenizerConfig) -> Prepared:
    """The prepared corpus, from the cache if this content was prepared before. Raises UserError."""
    fingerprint = fingerprint_of(data, tokenizer)
    directory = user_path(data.cache_dir) / fingerprint[:24]
    prepared = _from_cache(directory, warn=False)
    if prepared is not None:
        log.info("corpus: prepared before, %s", directory)
        if isinstance(tokenizer, schema.FileTokenizer):
            check_sampling(tokenizer, prepared.tokenizers)  # sampling is no part of what was prepared
        return prepared
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir={data.cache_dir}: cannot be made ({error.strerror})") from None
    with _alone(directory.with_name(f".{directory.name}.lock")):
        prepared = _from_cache(directory, warn=True)  # another process may have prepared it by now
        if prepared is None:
            _remove_leftovers(directory)
            if directory.exists():  # damaged, or half deleted
                shutil.rmtree(directory)
            working = directory.with_name(f".{directory.name}.{os.getpid()}.part")
            try:
                with named_errors(directory.parent):
                    working.mkdir()
                    _prepare(data, tokenizer, fingerprint, working)
                    working.rename(directory)  # all or nothing
            finally:
                shutil.rmtree(working, ignore_errors=True)
            prepared = Prepared(directory)
    return prepared


def _from_cache(directory: Path, *, warn: bool) -> Prepared | None:
    """What was prepared before; None if it is damaged, and has to be prepared again."""
    if not (directory / "report.json").exists():
        return None
    try:
        return Prepared(directory)
    except UserError as error:
        if warn:
            log.warning("corpus: %s; it is prepared again", str(error).removesuffix("; delete the folder"))
        return None


def _remove_leftovers(directory: Path) -> None:
    """Delete what killed preparations have left: of this corpus, whose lock is ours, and of those whose lock nobody
    holds."""
    for leftover in directory.parent.glob(".*.*.part"):
        name = leftover.name.split(".")[1]
        if name == directory.name or not _is_held(directory.with_name(f".{name}.lock")):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_held(lock: Path) -> bool:
    try:
        with open(os.open(lock, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time: the jobs of a sweep wait for the first to prepare what they share."""
    while True:
        # Closing it releases the lock, also for a process that is killed.
        with open(_open_lock(path), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                log.info("corpus: another process is preparing it, waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    continue
            except FileNotFoundError:
                continue  # the one before us has removed the file that we locked
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _open_lock(path: Path) -> int:
    """A descriptor of the lock, which may be another user's. A link might lead anywhere: not followed."""
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)  # NFS locks only what may be written
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """SHA-256 of all that decides what a prepared corpus holds. Where a file lies does not, what is in it does."""
    settings = {
        "format": FORMAT,
        "demo": demo.VERSION if data.kind == "demo" else None,
        "data": data.model_dump(exclude={"cache_dir", "train", "validation", "test", "path", "extra"}),
        "extra": len(data.extra),
        "splits": sorted(corpus.splits(data)) if data.kind != "demo" else None,
        "tokenizer": tokenizer.model_dump(exclude={"sampling", "sampling_sides", "source_model", "target_model"}),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    models = []
    if isinstance(tokenizer, schema.FileTokenizer):
        models = [user_path(name) for name in (tokenizer.source_model, tokenizer.target_model) if name]
    for path in [*corpus.files(data), *models]:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _prepare(data: schema.Data, tokenizer: schema.TokenizerConfig, fingerprint: str, working: Path) -> None:
    splits = corpus.splits(data)
    raw = {name: Raw(working, name) for name in splits}
    counts = {name: Counter[str]() for name in splits}
    overlap = Overlap()
    for name in sorted(splits, key="train".__eq__):  # last
        usable = _usable(overlap.watch(name, splits[name]), counts[name], name == "train")
        raw[name].write(tqdm(usable, f"read {name}", unit=" pairs", disable=None, leave=False))
    for name, count in counts.items():
        if not count["kept"]:
            raise UserError(f"data: none of the {count['read']} pairs read for {name} can be used (see data.{name})")
    log.info("tokenizer: %s", tokenizer.kind)
    tokenizers = make_tokenizers(
        tokenizer,
        lambda: (source for source, _, _ in raw["train"]),
        lambda: (target for _, target, _ in raw["train"]),
    )
    tokenizers.save(working)
    report: Report = {
        "fingerprint": fingerprint,
        "format": FORMAT,
        "languages": [data.source_lang, data.target_lang],
        "lowercase": tokenizer.lowercase,
        "vocabulary": [side.vocab_size for side in tokenizers],
        "splits": {},
    }
    seen = {name: counted(overlap, name) for name in splits}
    report["warnings"] = corpus_warnings(splits, seen, raw, {name: count["kept"] for name, count in counts.items()})
    for name, pairs in raw.items():
        limits = (data.max_length, data.max_ratio) if name == "train" else None
        encoded = _encode(working, name, pairs, tokenizers, limits, counts[name], splits[name])
        report["splits"][name] = encoded | {kind: found.total for kind, found in seen[name].items()}
        pairs.delete()
    if not counts["train"]["kept"]:
        raise UserError(
            f"data: the filters drop all {counts['train']['read']} training pairs (data.max_length="
            f"{data.max_length}, data.max_ratio={data.max_ratio}; see the numbers: {dict(counts['train'])})"
        )
    report["content"] = _content(working)
    write_atomically(working / "report.json", json.dumps(report, indent=2).encode())
    write_checksums(working)


def _content(directory: Path) -> str:
    """SHA-256 of the tokenizers and all token ids: what a model is trained on."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.model"), *directory.glob("*.ids")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _usable(pairs: Iterable[Pair], counts: "Counter[str]", filtered: bool) -> Iterator[Row]:
    """Training drops empty sides; what is translated and scored keeps every pair that can be read."""
    for source, target, alignment in pairs:
        counts["read"] += 1
        if source is None or target is None:
            counts["invalid_utf8"] += 1
        elif filtered and not (source.strip() and target.strip()):
            counts["empty"] += 1
        else:
            counts["kept"] += 1
            yield source, target, alignment


def _encode(
    directory: Path,
    name: str,
    pairs: Raw,
    tokenizers: Tokenizers,
    limits: tuple[int, float | None] | None,
    counts: "Counter[str]",
    read: Iterable[Pair],
) -> Report:
    """Write a split's arrays; returns its part of the report. `read` is what the pairs were read from."""
    writers = [SideWriter(directory, f"{name}.{side}") for side in ("source", "target")]
    alignments = AlignmentWriter(directory / f"{name}.alignments")
    unknown = [0, 0]
    bar = tqdm(total=counts.pop("kept"), desc=f"encode {name}", unit=" pairs", disable=None, leave=False)
    for chunk in pairs.chunks(CHUNK, CHARACTERS):
        bar.update(len(chunk))
        lines = [row[0] for row in chunk], [row[1] for row in chunk]
        ids = [tokenizer.encode(side) for tokenizer, side in zip(tokenizers, lines, strict=True)]
        kept = range(len(chunk))
        if limits is not None:
            reasons = [_reason(len(s), len(t), *limits) for s, t in zip(*ids, strict=True)]
            counts.update(filter(None, reasons))
            kept = [i for i, reason in enumerate(reasons) if reason is None]  # type: ignore[assignment]
        else:
            _refuse_endless(ids, read, counts["kept"])
        for side, writer in enumerate(writers):
            chosen = [ids[side][i] for i in kept]
            unknown[side] += sum(sentence.count(tokenizers[side].unk) for sentence in chosen)
            writer.add(chosen, [lines[side][i] for i in kept])
        alignments.add([chunk[i][2] for i in kept])
        counts["kept"] += len(kept)
    bar.close()
    alignments.close()
    for writer in writers:
        writer.close()
    tokens = [writer.offsets[-1] for writer in writers]
    return {
        "read": counts["read"],
        "kept": counts["kept"],
        "dropped": {reason: count for reason, count in counts.items() if reason not in {"read", "kept"}},
        "tokens": tokens,
        "longest": [int(np.diff(np.asarray(writer.offsets)).max(initial=0)) for writer in writers],
        "unknown_rate": [count / max(1, size) for count, size in zip(unknown, tokens, strict=True)],
    }


def _refuse_endless(ids: list[list[list[int]]], read: Iterable[Pair], before: int) -> None:
    """Held-out pairs are neither dropped nor cut. Raises UserError for one that is too long to be scored.

    ids: of sources and targets; `before` are the usable pairs before them.
    """
    for index, pair in enumerate(zip(*ids, strict=True), before):
        if (longest := max(map(len, pair))) > LONGEST_HELD_OUT:
            usable = (number for number, pair in enumerate(read, 1) if None not in (pair.source, pair.target))
            (number,) = itertools.islice(usable, index, index + 1)
            raise UserError(
                f"{corpus.place(read, [number])}: has {longest} tokens, but what is translated and scored may have "
                f"{LONGEST_HELD_OUT}; shorten the pair or take it out"
            )


def _reason(source: int, target: int, max_length: int, max_ratio: float | None) -> str | None:
    """Why a pair with so many tokens, </s> counted, is dropped."""
    if min(source, target) == 1:  # nothing that the tokenizer sees, such as a zero-width space
        return "empty"
    if max(source, target) > max_length:
        return "too_long"
    if max_ratio is not None and max(source, target) > max_ratio * min(source, target):
        return "ratio"
    return None
