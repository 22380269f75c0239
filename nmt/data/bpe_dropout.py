"""BPE-dropout (Provilkov et al. 2020): random segmentations, reproducible from a seed.

SentencePiece can sample too, but its results differ between processes even with a fixed seed, so that a run could be
neither repeated nor resumed. Here a segmentation depends only on the model, the line, alpha and a seed.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple, Self

from nmt.data.word_alignment import WORD_START

# Limits of the cache: entries, and characters of a cached word. Longer words are rare, and their entries large.
CACHED_WORDS, LONGEST_CACHED = 2**16, 32
NEVER = -math.inf  # score of a pair that must not be merged

Ids = tuple[int, ...]


class _Merged(NamedTuple):
    """A segmented word."""

    ids: Ids
    attempts: int  # number of pairs of symbols that were merged or skipped


class BpeDropout:
    """Splits a normalised line into words, and segments each as SentencePiece does: each attempt takes the pair of
    symbols with the best score, the leftmost if several are equal, and merges it. With probability alpha, it instead
    skips the pair until one of the two symbols changes."""

    def __init__(self, pieces: Any) -> None:  # noqa: ANN401
        """pieces: those of a SentencePiece ModelProto, each with a text `piece`, a `score` and a `type`."""

        def ids(kind: str) -> dict[str, int]:
            return {piece.piece: i for i, piece in enumerate(pieces) if piece.type == getattr(piece, kind)}

        self._ids, self._user_defined = ids("NORMAL"), ids("USER_DEFINED")
        self._scores = {text: pieces[i].score for text, i in self._ids.items()}
        (self._unknown,) = ids("UNKNOWN").values()
        byte_ids = ids("BYTE")  # a model has all 256 byte pieces or none
        self._bytes = [byte_ids[f"<0x{byte:02X}>"] for byte in range(256)] if byte_ids else []
        # Splits a line into units: words, and user-defined symbols, which are never split further.
        self._split = re.compile(self._unit_pattern(), re.DOTALL).findall
        # `_merge` draws nothing: it is told which attempts to skip, so equal arguments give equal segmentations.
        self._cached_merge = lru_cache(CACHED_WORDS)(self._merge)

    @classmethod
    def of(cls, proto: Any) -> Self | None:  # noqa: ANN401
        """Read a SentencePiece ModelProto. Returns None unless it is a BPE model without unused pieces, which
        SentencePiece would split again in a way that depends on the rest of the line."""
        is_bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
        return cls(proto.pieces) if is_bpe and all(piece.type != piece.UNUSED for piece in proto.pieces) else None

    def _unit_pattern(self) -> str:
        """Return a pattern that matches a word or a user-defined symbol. If some pieces contain spaces, the pattern
        takes the whole line as one word."""
        within = "." if any(WORD_START in piece[1:] for piece in self._ids) else f"[^{WORD_START}]"
        if not self._user_defined:
            return f"{WORD_START}?{within}+|{WORD_START}"
        user = "|".join(map(re.escape, sorted(self._user_defined, key=len, reverse=True)))  # try longer symbols first
        return f"{user}|{WORD_START}?(?:(?!{user}){within})+|{WORD_START}"

    def draw(self, text: str, alpha: float, seed: int) -> list[int]:
        """Segment a line, which SentencePiece has normalised, into token ids without </s>. Successive unknown tokens
        are merged."""
        ids: list[int] = []
        gaps = _gaps(alpha, Random(seed).random)
        next_skip = next(gaps)  # number of the next attempt that is skipped, from 0 at the start of the word
        for unit in self._split(text):
            if len(unit) > LONGEST_CACHED:
                word, next_skip = self._draw_long(unit, next_skip, gaps)
            else:
                skips: tuple[float, ...] = ()
                word = self._cached_merge(unit, skips)
                while next_skip < word.attempts:
                    skips += (next_skip,)
                    next_skip += 1 + next(gaps)
                    word = self._cached_merge(unit, skips)
            next_skip -= word.attempts
            ids += word.ids
        if self._unknown not in ids:
            return ids
        return [i for i, previous in zip(ids, [-1, *ids], strict=False) if not i == previous == self._unknown]

    def _draw_long(self, unit: str, next_skip: float, gaps: Iterator[float]) -> tuple[_Merged, float]:
        """Segment a word that is too long for the cache -> the segmented word, and the number of the first skipped
        attempt after it. This number and `next_skip` count from the start of the word.

        Draws all skips beforehand, so that the word is segmented only once. A word of n symbols needs fewer than 3 n
        attempts: it has n - 1 pairs at first, and each merge makes at most two new pairs.
        """
        skips = {next_skip}
        while next_skip < 3 * len(unit):
            next_skip += 1 + next(gaps)
            skips.add(next_skip)
        word = self._merge(unit, skips)
        return word, min(attempt for attempt in skips if attempt >= word.attempts)

    def _merge(self, unit: str, skips: Collection[float]) -> _Merged:
        """Segment a word by merging pairs. `skips` holds the numbers, from 0, of the attempts that are skipped."""
        symbols = [unit] if unit in self._user_defined else list(unit)
        score_of = self._scores.get
        scores = [score_of(left + right, NEVER) for left, right in itertools.pairwise(symbols)]
        attempts = 0
        while scores and (best := max(scores)) != NEVER:
            i = scores.index(best)
            attempts += 1
            if attempts - 1 in skips:
                scores[i] = NEVER
                continue
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            del scores[i]
            if i:
                scores[i - 1] = score_of(symbols[i - 1] + symbols[i], NEVER)
            if i < len(scores):
                scores[i] = score_of(symbols[i] + symbols[i + 1], NEVER)
        return _Merged(tuple(i for symbol in symbols for i in self._symbol(symbol)), attempts)

    def _symbol(self, text: str) -> Ids:
        """Look up the id of a piece. Other text gets the ids of its bytes, or <unk> if the model has no byte pieces."""
        piece = self._ids.get(text, self._user_defined.get(text))
        if piece is not None:
            return (piece,)
        return tuple(self._bytes[byte] for byte in text.encode()) if self._bytes else (self._unknown,)


def _gaps(alpha: float, uniform: Callable[[], float]) -> Iterator[float]:
    """Yield how many merges succeed before each skip, drawn from a geometric distribution. This is equivalent to one
    draw for each attempt, but most words need no draw."""
    if not alpha:
        yield math.inf
    log_success = math.log1p(-alpha) if alpha < 1 else -math.inf
    while True:
        yield math.log(1 - uniform()) // log_success
