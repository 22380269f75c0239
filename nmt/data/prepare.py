"""From a corpus as the user keeps it to a prepared directory, once per content: filter, tokenizer, ids, report."""

import array
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data import corpus, demo
from nmt.data.corpus import Pair
from nmt.data.prepared import FORMAT, IDS, Prepared
from nmt.data.tokenizer import Tokenizers, check_sampling, make_tokenizers

log = logging.getLogger(__name__)

CHUNK = 10_000  # pairs encoded at a time
Report = dict[str, Any]


def prepare(data: schema.Data, tokenizer: schema.TokenizerConfig) -> Prepared:
    """The prepared corpus, from the cache if this content was prepared before. Raises UserError."""
    fingerprint = fingerprint_of(data, tokenizer)
    directory = Path(data.cache_dir).expanduser() / fingerprint[:24]
    if (directory / "report.json").exists():
        log.info("corpus: prepared before, %s", directory)
        prepared = Prepared(directory)
        if isinstance(tokenizer, schema.FileTokenizer):
            check_sampling(tokenizer, prepared.tokenizers)  # sampling is no part of what was prepared
        return prepared
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir={data.cache_dir}: cannot be made ({error.strerror})") from None
    with _alone(directory.with_name(f".{directory.name}.lock")):
        if not (directory / "report.json").exists():
            for leftover in directory.parent.glob(f".{directory.name}.*.part"):
                shutil.rmtree(leftover, ignore_errors=True)  # of a preparation that was killed
            working = Path(tempfile.mkdtemp(".part", f".{directory.name}.", directory.parent))
            try:
                _prepare(data, tokenizer, fingerprint, working)
                working.rename(directory)  # all or nothing
            finally:
                shutil.rmtree(working, ignore_errors=True)
    return Prepared(directory)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time: the jobs of a sweep wait for the first to prepare what they share."""
    while True:
        with path.open("w") as lock:  # closing it releases the lock, also for a process that is killed
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


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """SHA-256 of all that decides what a prepared corpus holds. Where a file lies does not, what is in it does."""
    settings = {
        "format": FORMAT,
        "demo": demo.VERSION if data.kind == "demo" else None,
        "data": data.model_dump(exclude={"cache_dir", "train", "validation", "test", "path"}),
        "splits": sorted(corpus.splits(data)) if data.kind != "demo" else None,
        "tokenizer": tokenizer.model_dump(exclude={"sampling", "sampled", "source_model", "target_model"}),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    models = []
    if isinstance(tokenizer, schema.FileTokenizer):
        models = [Path(name).expanduser() for name in (tokenizer.source_model, tokenizer.target_model) if name]
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
    for name, read in splits.items():
        usable = _usable(read, counts[name], name == "train")
        raw[name].write(tqdm(usable, f"read {name}", unit=" pairs", disable=None, leave=False))
    for name, count in counts.items():
        if not count["kept"]:
            raise UserError(f"data: none of the {count['read']} pairs read for {name} can be used (see data.{name})")
    log.info("tokenizer: %s", tokenizer.kind)
    tokenizers = make_tokenizers(
        tokenizer,
        lambda: (pair[0] for pair in raw["train"]),
        lambda: (pair[1] for pair in raw["train"]),
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
    held_out = {pair[0] for name in raw if name != "train" for pair in raw[name]}
    seen: set[str] = set()
    for name, pairs in raw.items():
        limits = (data.max_length, data.max_ratio) if name == "train" else None
        report["splits"][name] = _encode(working, name, pairs, tokenizers, limits, counts[name])
        if name == "train":
            seen = {source for source, _, _ in pairs if source in held_out}
        else:
            report["splits"][name]["sources_in_train"] = sum(source in seen for source, _, _ in pairs)
        pairs.delete()
    if not counts["train"]["kept"]:
        raise UserError(
            f"data: the filters drop all {counts['train']['read']} training pairs (data.max_length="
            f"{data.max_length}, data.max_ratio={data.max_ratio}; see the numbers: {dict(counts['train'])})"
        )
    report["content"] = _content(working)
    (working / "report.json").write_text(json.dumps(report, indent=2), encoding="utf-8")


def _content(directory: Path) -> str:
    """SHA-256 of the tokenizers and all token ids: what a model is trained on."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.model"), *directory.glob("*.ids")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


class Raw:
    """The usable pairs of a split, on disk until they are encoded."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.raw"

    def write(self, pairs: Iterable[tuple[str, str, str]]) -> None:
        with self.path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{source}\n{target}\n{alignment}\n" for source, target, alignment in pairs)

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        with self.path.open(encoding="utf-8", newline="\n") as file:
            lines = (line[:-1] for line in file)
            yield from zip(lines, lines, lines, strict=True)

    def delete(self) -> None:
        self.path.unlink()


def _usable(pairs: Iterable[Pair], counts: "Counter[str]", filtered: bool) -> Iterator[tuple[str, str, str]]:
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


class _Writer(NamedTuple):
    """One side of a split being written."""

    directory: Path
    name: str
    offsets: "array.array[int]"
    line_ends: "array.array[int]"

    def add(self, ids: list[list[int]], lines: list[str]) -> None:
        with (
            (self.directory / f"{self.name}.ids").open("ab") as id_file,
            (self.directory / f"{self.name}.txt").open("ab") as text_file,
        ):
            id_file.write(np.fromiter(itertools.chain.from_iterable(ids), dtype=IDS).tobytes())
            for sentence, line in zip(ids, lines, strict=True):
                text = line.encode("utf-8")
                text_file.write(text)
                self.offsets.append(self.offsets[-1] + len(sentence))
                self.line_ends.append(self.line_ends[-1] + len(text))

    def close(self) -> None:
        np.save(self.directory / f"{self.name}.offsets.npy", np.asarray(self.offsets))
        np.save(self.directory / f"{self.name}.lines.npy", np.asarray(self.line_ends))


def _encode(
    directory: Path,
    name: str,
    pairs: Raw,
    tokenizers: Tokenizers,
    limits: tuple[int, float | None] | None,
    counts: "Counter[str]",
) -> Report:
    """Write a split's arrays; returns its part of the report."""
    writers = [
        _Writer(directory, f"{name}.{side}", array.array("q", [0]), array.array("q", [0]))
        for side in ("source", "target")
    ]
    unknown = [0, 0]
    alignments: list[str] = []
    total = counts["kept"]
    bar = tqdm(total=total, desc=f"encode {name}", unit=" pairs", disable=None, leave=False)
    rows = iter(pairs)
    while chunk := list(itertools.islice(rows, CHUNK)):
        bar.update(len(chunk))
        ids = [tokenizers[side].encode([row[side] for row in chunk]) for side in (0, 1)]
        kept = range(len(chunk))
        if limits is not None:
            reasons = [_reason(len(s), len(t), *limits) for s, t in zip(*ids, strict=True)]
            counts.update(filter(None, reasons))
            kept = [i for i, reason in enumerate(reasons) if reason is None]  # type: ignore[assignment]
        for side, writer in enumerate(writers):
            chosen = [ids[side][i] for i in kept]
            unknown[side] += sum(sentence.count(tokenizers[side].unk) for sentence in chosen)
            writer.add(chosen, [chunk[i][side] for i in kept])
        alignments.extend(chunk[i][2] for i in kept)
    bar.close()
    counts["kept"] = len(alignments)
    for writer in writers:
        writer.close()
    if any(alignments):
        (directory / f"{name}.alignments").write_text("\n".join(alignments) + "\n", encoding="utf-8")
    tokens = [writer.offsets[-1] for writer in writers]
    return {
        "read": counts["read"],
        "kept": counts["kept"],
        "dropped": {reason: count for reason, count in counts.items() if reason not in {"read", "kept"}},
        "tokens": tokens,
        "longest": [int(np.diff(np.asarray(writer.offsets)).max(initial=0)) for writer in writers],
        "unknown_rate": [count / max(1, size) for count, size in zip(unknown, tokens, strict=True)],
    }


def _reason(source: int, target: int, max_length: int, max_ratio: float | None) -> str | None:
    if max(source, target) > max_length:
        return "too_long"
    if max_ratio is not None and max(source, target) > max_ratio * min(source, target):
        return "ratio"
    return None
