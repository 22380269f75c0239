"""Prepare a corpus: filter it, train the tokenizer, encode, write a report. Equal content is prepared only once."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.config.schema import data as schema
from nmt.data import corpus
from nmt.data.corpus import Pair
from nmt.data.corpus_warnings import PairStatistics, corpus_warnings
from nmt.data.demo import corpus as demo
from nmt.data.prepared import FORMAT, Prepared, RawPairs, Row, SideWriter, write_checksums
from nmt.data.tokenizer import Tokenizers
from nmt.data.tokenizer_training import check_sampling, make_tokenizers
from nmt.files import is_locked, named_errors, write_atomically

log = logging.getLogger(__name__)

CHUNK, CHARACTERS = 10_000, 5_000_000  # pairs and characters encoded at a time
MAX_HELD_OUT = 5_000  # tokens of a held-out sentence, so that the attention of its batch fits in memory
Report = dict[str, Any]


def prepare(data: schema.Data, tokenizer: schema.TokenizerConfig) -> Prepared:
    """Prepare a corpus, or open it in the cache if this content was prepared before. Raises UserError."""
    fingerprint = fingerprint_of(data, tokenizer)
    directory = user_path(data.cache_dir) / fingerprint[:24]
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
            _remove_leftovers(directory)
            if directory.exists():  # damaged
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
    """The prepared corpus; None if it does not exist or is damaged."""
    if not (directory / "report.json").exists():
        return None
    try:
        return Prepared(directory)
    except UserError as error:
        if warn:
            log.warning("corpus: %s; preparing it again", str(error).partition("; delete the folder")[0])
        return None


def _remove_leftovers(directory: Path) -> None:
    """Delete what killed processes left half-prepared: of this corpus, whose lock we hold, and of unlocked ones."""
    for leftover in directory.parent.glob(".*.*.part"):
        name = leftover.name.split(".")[1]
        if name == directory.name or not is_locked(directory.with_name(f".{name}.lock")):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock: the jobs of a sweep wait until the first one has prepared their corpus."""
    while True:
        with open(_open_lock(path), "rb") as lock:  # closing it releases the lock, also after a kill
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
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
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def fingerprint_of(data: schema.Data, tokenizer: schema.TokenizerConfig) -> str:
    """SHA-256 of everything that determines a prepared corpus: settings and file contents, but not paths."""
    settings = {
        "format": FORMAT,
        "demo": demo.VERSION if data.kind == "demo" else None,
        "data": data.model_dump(exclude={"cache_dir", "train", "validation", "test", "path", "extra"}),
        "extra": len(data.extra),
        "splits": sorted(corpus.splits(data)) if data.kind != "demo" else None,
        "tokenizer": tokenizer.model_dump(exclude={"sampling", "sampling_sides", "source_model", "target_model"}),
    }
    models = []
    if isinstance(tokenizer, schema.FileTokenizer):
        models = [user_path(name) for name in (tokenizer.source_model, tokenizer.target_model) if name]
    return _digest_of_files([*corpus.files(data), *models], json.dumps(settings, sort_keys=True).encode())


def _digest_of_files(paths: Iterable[Path], start: bytes = b"") -> str:
    digest = hashlib.sha256(start)
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


@dataclass
class _Split:
    """A split being prepared."""

    name: str
    pairs: Iterable[Pair]  # as read
    usable: RawPairs
    counts: "Counter[str]" = field(default_factory=Counter)  # read, kept, and dropped by reason

    def read(self, statistics: PairStatistics) -> None:
        """Store the usable pairs."""
        rows = self._usable(statistics.watch(self.name, self.pairs))
        self.usable.write(tqdm(rows, f"read {self.name}", unit=" pairs", disable=None, leave=False))
        if not self.counts["kept"]:
            raise UserError(
                f"data: none of the {self.counts['read']} pairs read for {self.name} can be used (see data.{self.name})"
            )

    def _usable(self, pairs: Iterable[Pair]) -> Iterator[Row]:
        """Drop invalid pairs, and training pairs with an empty side; held-out pairs are all translated and scored."""
        for source, target, alignment in pairs:
            self.counts["read"] += 1
            if source is None or target is None:
                self.counts["invalid_utf8"] += 1
            elif self.name == "train" and not (source.strip() and target.strip()):
                self.counts["empty"] += 1
            else:
                self.counts["kept"] += 1
                yield source, target, alignment

    def encode(self, directory: Path, tokenizers: Tokenizers, data: schema.Data) -> Report:
        """Write the split's files. Returns its part of the report."""
        writers = [SideWriter(directory, f"{self.name}.{side}") for side in ("source", "target")]
        alignments = directory / f"{self.name}.alignments"
        unknown, any_links = [0, 0], False
        bar = tqdm(total=self.counts.pop("kept"), desc=f"encode {self.name}", unit=" pairs", disable=None, leave=False)
        for chunk in self.usable.chunks(CHUNK, CHARACTERS):
            bar.update(len(chunk))
            lines = [row[0] for row in chunk], [row[1] for row in chunk]
            ids = [tokenizer.encode(side) for tokenizer, side in zip(tokenizers, lines, strict=True)]
            kept = list(range(len(chunk)))
            if self.name == "train":
                reasons = [_reason_to_drop(len(s), len(t), data) for s, t in zip(*ids, strict=True)]
                self.counts.update(filter(None, reasons))
                kept = [i for i in kept if reasons[i] is None]
            else:
                self._check_lengths(ids)
            for side, writer in enumerate(writers):
                sentences = [ids[side][i] for i in kept]
                unknown[side] += sum(sentence.count(tokenizers[side].unk) for sentence in sentences)
                writer.add(sentences, [lines[side][i] for i in kept])
            links = [chunk[i][2] for i in kept]
            any_links = any_links or any(links)
            with alignments.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{line}\n" for line in links)
            self.counts["kept"] += len(kept)
        bar.close()
        for writer in writers:
            writer.close()
        if not any_links:
            alignments.unlink(missing_ok=True)
        self.usable.delete()
        tokens = [writer.offsets[-1] for writer in writers]
        return {
            "read": self.counts["read"],
            "kept": self.counts["kept"],
            "dropped": {reason: count for reason, count in self.counts.items() if reason not in {"read", "kept"}},
            "tokens": tokens,
            "longest": [int(np.diff(np.asarray(writer.offsets)).max(initial=0)) for writer in writers],
            "unknown_rate": [count / max(1, size) for count, size in zip(unknown, tokens, strict=True)],
        }

    def _check_lengths(self, ids: list[list[list[int]]]) -> None:
        """Raises UserError for a held-out pair in the next chunk that is too long to be translated and scored."""
        for index, pair in enumerate(zip(*ids, strict=True), self.counts["kept"]):
            if (longest := max(map(len, pair))) > MAX_HELD_OUT:
                valid = (number for number, pair in enumerate(self.pairs, 1) if None not in (pair.source, pair.target))
                (number,) = itertools.islice(valid, index, index + 1)
                raise UserError(
                    f"{corpus.locate(self.pairs, [number])}: has {longest} tokens, more than the {MAX_HELD_OUT} "
                    "allowed in a held-out sentence; shorten the pair or remove it"
                )


def _reason_to_drop(source: int, target: int, data: schema.Data) -> str | None:
    """Why a training pair with these numbers of tokens, </s> counted, is dropped; None if it is kept."""
    if min(source, target) == 1:  # nothing that the tokenizer can see, such as a zero-width space
        return "empty"
    if max(source, target) > data.max_length:
        return "too_long"
    if data.max_ratio is not None and max(source, target) > data.max_ratio * min(source, target):
        return "ratio"
    return None


def _prepare(data: schema.Data, tokenizer: schema.TokenizerConfig, fingerprint: str, working: Path) -> None:
    splits = {name: _Split(name, pairs, RawPairs(working, name)) for name, pairs in corpus.splits(data).items()}
    statistics, train = PairStatistics(), splits["train"]
    for split in (*(split for split in splits.values() if split is not train), train):
        split.read(statistics)
    log.info("tokenizer: %s", tokenizer.kind)
    sides = lambda: (row[0] for row in train.usable), lambda: (row[1] for row in train.usable)
    tokenizers = make_tokenizers(tokenizer, *sides)
    tokenizers.save(working)
    matches = {name: statistics.of(name) for name in splits}
    warnings = corpus_warnings(
        {name: split.pairs for name, split in splits.items()},
        matches,
        {name: split.usable for name, split in splits.items()},
        {name: split.counts["kept"] for name, split in splits.items()},
    )
    reports: Report = {}
    for name, split in splits.items():
        reports[name] = split.encode(working, tokenizers, data) | {key: m.total for key, m in matches[name].items()}
    if not train.counts["kept"]:
        raise UserError(
            f"data: the filters drop all {train.counts['read']} training pairs (data.max_length={data.max_length}, "
            f"data.max_ratio={data.max_ratio}; pairs dropped by each filter: {dict(train.counts)})"
        )
    report: Report = {
        "fingerprint": fingerprint,
        "format": FORMAT,
        "languages": [data.source_lang, data.target_lang],
        "lowercase": tokenizer.lowercase,
        "vocabulary": [side.vocab_size for side in tokenizers],
        "splits": reports,
        "warnings": warnings,
        # What a model is trained on: tokenizers and token ids.
        "content": _digest_of_files(sorted([*working.glob("*.model"), *working.glob("*.ids")])),
    }
    write_atomically(working / "report.json", json.dumps(report, indent=2).encode())
    write_checksums(working)
