"""Subword segmentations drawn at random: BPE-dropout and subword regularisation."""

import itertools
import math
import re
import struct
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

UNIGRAM, BPE = 1, 2  # kinds of models
NORMAL, UNKNOWN, USER_DEFINED, UNUSED, BYTE = 1, 2, 4, 5, 6  # types of pieces

PIECES, TRAINER = 1, 2  # numbers of a model's fields ...
TEXT, SCORE, TYPE = 1, 2, 3  # ... of a piece's ...
KIND = 3  # ... and of the trainer's
MORE = 0x80  # the bit that says that an integer goes on


class Piece(NamedTuple):
    """Its id is its place in the model."""

    text: str
    score: float
    type: int


class Model(NamedTuple):
    """A model's kind and pieces."""

    kind: int
    pieces: list[Piece]


def read_model(model: bytes) -> Model:
    """The bytes must be a model that SentencePiece has loaded."""
    fields = list(_fields(model))
    kind = next((dict(_fields(value)).get(KIND) for number, value in fields if number == TRAINER), None)
    return Model(kind or UNIGRAM, [_piece(value) for number, value in fields if number == PIECES])


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(SCORE, bytes(4)))
    text = fields[TEXT].decode("utf-8", "surrogateescape")  # what is no UTF-8 stands in no line
    return Piece(text, score, fields.get(TYPE, NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers as such, all else as bytes."""
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        number, form = divmod(key, 8)
        match form:
            case 0:
                value, at = _integer(message, at)
                yield number, value
                continue
            case 2:
                size, at = _integer(message, at)
            case _:
                size = 8 if form == 1 else 4
        yield number, message[at : at + size]
        at += size


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """An integer, seven bits a byte and the lowest first, and where it ends."""
    value = shift = 0
    while message[at] & MORE:
        value |= (message[at] & ~MORE) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1


SPACE = "▁"  # what SentencePiece writes for a space
CACHED_WORDS, LONGEST_CACHED = 2**16, 32  # words recur; longer ones are rare and take much memory
NEVER = -math.inf  # score of a pair that is not merged

Ids = tuple[int, ...]
Uniform = Callable[[], float]


def sampler(model: bytes) -> "Sampler | None":
    """None if segmentations cannot be drawn: the model is of words or characters, or of BPE with unused pieces, which
    SentencePiece takes apart again in a way that depends on the rest of the line."""
    found = read_model(model)
    if found.kind == UNIGRAM:
        return UnigramSampler(found.pieces)
    if found.kind == BPE and not any(piece.type == UNUSED for piece in found.pieces):
        return BpeSampler(found.pieces)
    return None


class Sampler(ABC):
    """Cuts a normalised line into words, draws each word's pieces, and joins runs of unknown characters."""

    def __init__(self, all_pieces: list[Piece]) -> None:
        def ids(kind: int) -> dict[str, int]:
            return {piece.text: i for i, piece in enumerate(all_pieces) if piece.type == kind}

        self._ids, self._user = ids(NORMAL), ids(USER_DEFINED)
        self._scores = {piece.text: piece.score for piece in all_pieces if piece.type == NORMAL}
        (self._unknown,) = ids(UNKNOWN).values()
        spelled = ids(BYTE)
        self._bytes = [spelled[f"<0x{byte:02X}>"] for byte in range(256)] if spelled else []  # all of them or none
        self._units = re.compile(self._unit_pattern(), re.DOTALL).findall

    def _unit_pattern(self) -> str:
        """User-defined symbols, which stay whole, and words (a line is one if pieces go on after a space)."""
        within = "." if any(SPACE in piece[1:] for piece in self._ids) else f"[^{SPACE}]"
        if not self._user:
            return f"{SPACE}?{within}+|{SPACE}"
        user = "|".join(map(re.escape, sorted(self._user, key=len, reverse=True)))  # the longest that fits
        return f"{user}|{SPACE}?(?:(?!{user}){within})+|{SPACE}"

    def draw(self, text: str, alpha: float, seed: int) -> list[int]:
        """A line in SentencePiece's normalised form -> ids, without </s>."""
        ids = self._draw(self._units(text), alpha, Random(seed).random)
        if self._unknown not in ids:
            return ids
        return [i for i, before in zip(ids, [-1, *ids], strict=False) if not i == before == self._unknown]

    @abstractmethod
    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        """User-defined symbols and words -> ids; `uniform` draws from [0, 1)."""

    def _symbol(self, text: str) -> Ids:
        """A piece's id; those of its bytes, or the unknown one, where it is none."""
        known = self._ids.get(text, self._user.get(text))
        if known is not None:
            return (known,)
        return tuple(self._bytes[byte] for byte in text.encode()) if self._bytes else (self._unknown,)


class _Merged(NamedTuple):
    """What becomes of a word."""

    ids: Ids
    attempts: int  # merges made and skipped


class BpeSampler(Sampler):
    """BPE-dropout (Provilkov et al. 2020), as in SentencePiece: the pair with the best score is merged first, the
    leftmost among equals; with probability alpha it is passed over instead, until one of its symbols changes."""

    def __init__(self, all_pieces: list[Piece]) -> None:
        super().__init__(all_pieces)
        self._cached = lru_cache(CACHED_WORDS)(self._merge)

    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        ids: list[int] = []
        gaps = _gaps(alpha, uniform)
        skipped = next(gaps)  # the attempt that is skipped next, counted from where a word begins
        for unit in units:
            if len(unit) > LONGEST_CACHED:
                word, skipped = self._draw_once(unit, skipped, gaps)
            else:
                skips: tuple[float, ...] = ()
                word = self._cached(unit, skips)
                while skipped < word.attempts:
                    skips += (skipped,)
                    skipped += 1 + next(gaps)
                    word = self._cached(unit, skips)
            skipped -= word.attempts
            ids += word.ids
        return ids

    def _draw_once(self, unit: str, skipped: float, gaps: Iterator[float]) -> tuple[_Merged, float]:
        """A long word and the next attempt to be skipped. All that it may skip is drawn first: of n symbols there are
        n - 1 pairs at first and two new ones after a merge, so less than 3 n attempts."""
        skips = {skipped}
        while skipped < 3 * len(unit):
            skipped += 1 + next(gaps)
            skips.add(skipped)
        word = self._merge(unit, skips)
        return word, min(attempt for attempt in skips if attempt >= word.attempts)

    def _merge(self, unit: str, skips: Collection[float]) -> _Merged:
        """A word whose merges are made but for those attempts."""
        symbols = [unit] if unit in self._user else list(unit)
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


def _gaps(alpha: float, uniform: Uniform) -> Iterator[float]:
    """How many attempts succeed before one is skipped with probability alpha, again and again: a draw for each gap is
    as good as one for each attempt, and most words then need none."""
    if not alpha:
        yield math.inf
    log_kept = math.log1p(-alpha) if alpha < 1 else -math.inf
    while True:
        yield math.log(1 - uniform()) // log_kept


class _Ending(NamedTuple):
    """The pieces that end at a position of a word."""

    cumulative: list[float]  # probability of the first, of the first two and so on; without the last, which is 1
    starts: list[int]
    ids: list[Ids]


class UnigramSampler(Sampler):
    """Subword regularisation (Kudo 2018): segmentations have probabilities like their own in the model to the power of
    alpha. Drawn from the end, piece by piece, with the sums over all ways to come there (forward filtering)."""

    def __init__(self, all_pieces: list[Piece]) -> None:
        super().__init__(all_pieces)
        self._longest = max(map(len, self._ids), default=0)
        self._unknown_score = min(self._scores.values(), default=0.0) - 10  # SentencePiece's
        self._cached = lru_cache(CACHED_WORDS)(self._word)

    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        ids: list[int] = []
        for unit in reversed(units):
            word = self._cached(unit, alpha) if len(unit) <= LONGEST_CACHED else self._word(unit, alpha)
            position = len(word)
            while position:
                ending = word[position - 1]
                choice = bisect(ending.cumulative, uniform()) if ending.cumulative else 0
                ids += ending.ids[choice]
                position = ending.starts[choice]
        ids.reverse()
        return ids

    def _word(self, unit: str, alpha: float) -> list[_Ending]:
        """What can end after each of the symbols; ids are backwards, as they are drawn."""
        if unit in self._user:
            return [_Ending([], [0], [(self._user[unit],)])]
        sums = [0.0]  # log of the sum over all ways to come to a position
        endings = []
        for end in range(1, len(unit) + 1):
            starts = [i for i in range(max(0, end - self._longest), end - 1) if unit[i:end] in self._scores]
            starts.append(end - 1)
            texts = [unit[start:end] for start in starts]
            logs = [
                sums[start] + alpha * self._scores.get(text, self._unknown_score)
                for start, text in zip(starts, texts, strict=True)
            ]
            most = max(logs)
            weights = [math.exp(log - most) for log in logs]
            total = math.fsum(weights)
            cumulative = list(itertools.accumulate(weight / total for weight in weights[:-1]))
            sums.append(most + math.log(total))
            endings.append(_Ending(cumulative, starts, [self._symbol(text)[::-1] for text in texts]))
        return endings
