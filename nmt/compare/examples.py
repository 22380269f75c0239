"""Sentences with the translations of every system, and the attention between their words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmt.compare.entry import Entry, HeldOut, System
from nmt.compare.field import Field
from nmt.config.errors import UserError
from nmt.evaluate.bleu import sentence_bleu
from nmt.system.files import read_lines

PERCENT = 100  # the largest attention weight


def example_sentences(
    systems: Sequence[System], field: Field, held_out: HeldOut, count: int, sentences: Sequence[int]
) -> list[dict[str, Any]]:
    """Sentences with the translations of each system's first run. Unless `sentences` names them, half are those where
    the systems differ most and half are spread over all lengths. Raises UserError if a number is out of range."""
    total = len(held_out.references)
    for number in sentences:
        if number > total:
            raise UserError(f"sentences={number}: the test set has {total}")
    firsts = [(system, system.entries[0]) for system in systems]
    scores = np.array([sentence_bleu(field.counts(entry)) for _, entry in firsts])
    if sentences:
        numbers = [number - 1 for number in dict.fromkeys(sentences)]
    else:
        by_length = sorted(range(total), key=lambda i: len(held_out.sources[i].split()))
        spread = [by_length[int(i)] for i in np.linspace(0, total - 1, min(total, count - count // 2))]
        rest = [int(i) for i in np.argsort(scores.min(0) - scores.max(0), kind="stable") if int(i) not in spread]
        numbers = sorted({*spread, *rest[: count // 2]})
    alignments = [_word_alignments(entry, numbers, total) for _, entry in firsts]
    return [
        {
            "number": i + 1,
            "source": held_out.sources[i],
            "reference": held_out.references[i],
            "translations": [
                {
                    "system": system.name,
                    "run": entry.name,
                    "bleu": round(float(scores[row, i]), 4),
                    "text": entry.hypotheses[i],
                    "alignment": alignments[row][i],
                }
                for row, (system, entry) in enumerate(firsts)
            ],
        }
        for i in numbers
    ]


def _word_alignments(entry: Entry, numbers: Sequence[int], total: int) -> dict[int, dict[str, Any] | None]:
    """The attention between the words of these sentences; None for a run without."""
    if entry.word_weights is None:
        return dict.fromkeys(numbers)
    lines = read_lines(entry.word_weights)
    if len(lines) != total:
        raise UserError(f"{entry.word_weights}: has {len(lines)} lines for {total} sentences; evaluate the run again")
    return {number: _parsed(entry.word_weights, number, lines[number]) for number in numbers}


def _parsed(path: Path, number: int, line: str) -> dict[str, Any] | None:
    """Words and weights in the form that the page relies on: the file may come from an untrusted source."""
    try:
        values = json.loads(line)
        if not values:
            return None
        words = {side: [str(word) for word in values[side]] for side in ("source", "target")}
        weights = [[int(weight) for weight in row] for row in values["weights"]]
        "".join(words["source"] + words["target"]).encode()
        valid = [len(row) for row in weights] == [len(words["source"])] * len(words["target"])
        valid = valid and all(0 <= weight <= PERCENT for row in weights for weight in row)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{path}, line {number + 1}: is no attention between words; evaluate the run again")
    return {**words, "weights": weights}
