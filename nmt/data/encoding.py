"""The second pass over a corpus: encodes the usable pairs of a split, drops training pairs by length, and writes the
files that `prepared.Split` reads. Worker processes handle chunks of pairs, which come back in the order of the corpus.
"""

from collections import Counter
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.config.schema import data as schema
from nmt.data.corpus import Source, locate
from nmt.data.prepared import IDS, Array, Sentences, SideWriter
from nmt.data.raw import RawChunk, RawSplit
from nmt.data.text import is_blank
from nmt.data.tokenizer import Tokenizers
from nmt.system.processes import Workers

ENCODE_IN_MAIN = 4  # chunks that the main process encodes before it starts workers
MAX_HELD_OUT = 5_000  # most tokens of a held-out sentence: the attention weights of its batch must fit in memory

Limits = tuple[int, float | None]  # max_length and max_ratio


def encode_split(
    name: str, raw: RawSplit, sources: list[Source], working: Path, lowercase: bool, data: schema.Data, workers: Workers
) -> dict[str, Any]:
    """Encode the usable pairs of a split with the tokenizers in `working`, and write the files of the split there.

    Returns the split's part of the corpus report. Raises UserError for a held-out sentence that is too long.
    """
    limits = (data.max_length, data.max_ratio) if name == "train" else None
    dropped, kept, has_links = Counter(empty=raw.read - len(raw)), 0, False
    bar = tqdm(desc=f"encode {name}", total=len(raw), unit=" pairs", disable=None, leave=False)
    with ExitStack() as stack, bar:
        sides = [SideWriter(working, f"{name}.{side}", stack) for side in Tokenizers._fields]
        alignments = stack.enter_context((working / f"{name}.alignments").open("wb"))
        for chunk in workers.map(partial(_encode, working, lowercase, limits), raw.chunks, ENCODE_IN_MAIN):
            if chunk.too_long is not None:
                index, tokens = chunk.too_long
                raise UserError(
                    f"{locate(sources, [kept + index + 1])}: has {tokens} tokens, more than the {MAX_HELD_OUT} allowed "
                    "in a held-out sentence; shorten the pair or remove it"
                )
            for writer, side in zip(sides, chunk.sides, strict=True):
                writer.append(side)
            alignments.write("".join(f"{line}\n" for line in chunk.alignments).encode())
            has_links |= any(chunk.alignments)
            dropped.update(chunk.dropped)
            kept += len(chunk.alignments)
            bar.update(len(chunk.alignments) + sum(chunk.dropped.values()))
    if not has_links:
        (working / f"{name}.alignments").unlink()
    return {
        "read": raw.read,
        "kept": kept,
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "tokens": [side.tokens for side in sides],
        "longest": [side.longest for side in sides],
        "unknown_rate": [side.unknown / max(1, side.tokens) for side in sides],
    }


class _EncodedChunk(NamedTuple):
    """The pairs of a chunk that are kept, and the number of dropped pairs by reason."""

    sides: list[Sentences]
    alignments: list[str]
    dropped: dict[str, int]
    too_long: tuple[int, int] | None  # first held-out pair that is too long: (its index, tokens of its longer side)


def _encode(directory: Path, lowercase: bool, limits: Limits | None, chunk: RawChunk) -> _EncodedChunk:
    """Encode the pairs of a chunk, and choose those to keep. `limits` are for training pairs, None for held-out ones.

    Each process loads the tokenizers at its first chunk.
    """
    *columns, links = chunk.columns()
    tokenizers = _tokenizers(directory, lowercase)
    ids = [
        tokenizer.encode(["" if is_blank(line) else line for line in lines])
        for tokenizer, lines in zip(tokenizers, columns, strict=True)
    ]
    lengths = np.array([[len(sentence) for sentence in side] for side in ids], np.int32)
    keep, dropped, too_long = np.ones(len(links), bool), dict[str, int](), None
    longest = lengths.max(axis=0, initial=0)
    if limits is not None:
        keep, dropped = _filter(lengths, *limits)
    elif longest.max(initial=0) > MAX_HELD_OUT:
        index = int(np.argmax(longest > MAX_HELD_OUT))
        too_long = index, int(longest[index])
    sides = []
    for tokenizer, lines, sentences, sizes in zip(tokenizers, columns, ids, lengths, strict=True):
        tokens = np.fromiter(chain.from_iterable(compress(sentences, keep)), IDS)
        texts = [line.encode() for line in compress(lines, keep)]
        text_sizes = np.fromiter(map(len, texts), np.int32, len(texts))
        unknown = int((tokens == tokenizer.unk).sum())
        sides.append(Sentences(tokens, sizes[keep], b"".join(texts), text_sizes, unknown))
    return _EncodedChunk(sides, list(compress(links, keep)), dropped, too_long)


def _filter(lengths: Array, max_length: int, max_ratio: float | None) -> tuple[Array, dict[str, int]]:
    """Choose the training pairs to keep, and count the dropped pairs by reason. `lengths` (2, N) include </s>."""
    shortest, longest = lengths.min(axis=0), lengths.max(axis=0)
    reasons = {
        "empty": shortest == 1,  # a side has only </s>: the tokenizer removed, for example, a zero-width space
        "too_long": longest > max_length,
        "ratio": longest > (np.inf if max_ratio is None else max_ratio) * shortest,
    }
    keep = np.ones(lengths.shape[1], bool)
    dropped = {}
    for reason, mask in reasons.items():
        dropped[reason] = int((keep & mask).sum())
        keep &= ~mask
    return keep, dropped


@lru_cache(1)
def _tokenizers(directory: Path, lowercase: bool) -> Tokenizers:
    return Tokenizers.load(directory, lowercase)
