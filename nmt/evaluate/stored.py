"""Sentence statistics of an output in a file beside it, because TER takes seconds for each thousand sentences."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from nmt.evaluate.bleu import METRICS, Counted, ScoreSettings, count
from nmt.system.files import read_bytes, write_atomically

SUFFIX = ".statistics.safetensors"  # in place of .txt
WIDTHS = {"bleu": 10, "chrf": 18, "ter": 2}


def stored_counts(path: Path, hypotheses: Sequence[str], references: Sequence[str], settings: ScoreSettings) -> Counted:
    """The statistics in the file if they belong to these texts and metrics; else count them, and write the file.

    A file that cannot be written is left out. Raises ValueError as `count` does.
    """
    signatures = _signatures(settings)
    key = _key(hypotheses, references, signatures)
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        arrays = load(read_bytes(path))
        counts = {name: arrays[name].astype(np.int64, casting="safe") for name in METRICS}
        shapes = {name: (len(references), width) for name, width in WIDTHS.items()}
        valid = shapes == {name: rows.shape for name, rows in counts.items()}
        if valid and arrays["key"].tobytes() == key and min(rows.min() for rows in counts.values()) >= 0:
            return Counted(counts, signatures)
    counted = count(hypotheses, references, settings)
    write_counts(path, counted, hypotheses, references)
    return counted


def write_counts(path: Path, counted: Counted, hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Write the statistics of all metrics, unless the folder cannot be written."""
    arrays = {name: rows.astype(np.int32) for name, rows in counted.counts.items()}
    arrays["key"] = np.frombuffer(_key(hypotheses, references, counted.signatures), np.uint8)
    with suppress(OSError):
        write_atomically(path, save(arrays))


@cache
def _signatures(settings: ScoreSettings) -> Mapping[str, str]:
    return count([""], ["x"], settings).signatures


def _key(*texts: object) -> bytes:
    """A digest of texts, references and signatures."""
    return hashlib.sha256(json.dumps(texts).encode()).digest()
