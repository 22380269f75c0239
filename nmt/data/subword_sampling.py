"""Random segmentations, reproducible from a seed: BPE-dropout and subword regularisation.

SentencePiece can sample too, but its results differ between processes even with a fixed seed, so that a run could be
neither repeated nor resumed. Here a segmentation depends only on the model, the line, alpha and a seed.
"""

import itertools
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from nmt.data.word_alignment import WORD_START

# Limits of a sampler's cache: entries, and characters of a cached word. Longer words are rare, and their entries large.
CACHED_WORDS, LONGEST_CACHED = 2**16, 32
NEVER = -math.inf  # score of a pair that must not be merged

Ids = tuple[int, ...]
Pieces = Any  # the pieces of a SentencePiece ModelProto; each has a text `piece`, a `score` and a `type`
Uniform = Callable[[], float]  # draws a number from [0, 1)


def make_sampler(model: bytes) -> "Sampler | None":
    """Make the sampler of a SentencePiece model. Returns None for word and character models, and for BPE models with
    unused pieces, because SentencePiece splits such pieces again in a way that depends on the rest of the line."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        return UnigramSampler(proto.pieces)
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE and all(p.type != p.UNUSED for p in proto.pieces):
        return BpeSampler(proto.pieces)
    return None


class Sampler(ABC):
    """Splits a normalised line into words, samples a segmentation of each, and merges successive unknown tokens."""

    def __init__(self, pieces: Pieces) -> None:
        def ids(kind: str) -> dict[str, int]:
            return {piece.piece: i for i, piece in enumerate(pieces) if piece.type == getattr(piece, kind)}

        self._ids, self._user = ids("NORMAL"), ids("USER_DEFINED")
        self._scores = {text: pieces[i].score for text, i in self._ids.items()}
        (self._unknown,) = ids("UNKNOWN").values()
        byte_ids = ids("BYTE")  # a model has all 256 byte pieces or none
        self._bytes = [byte_ids[f"<0x{byte:02X}>"] for byte in range(256)] if byte_ids else []
        self._units = re.compile(self._unit_pattern(), re.DOTALL).findall

    def _unit_pattern(self) -> str:
        """Return a pattern that matches a word or a user-defined symbol.

        If some pieces contain spaces, the pattern takes the whole line as one word.
        """
        within = "." if any(WORD_START in piece[1:] for piece in self._ids) else f"[^{WORD_START}]"
        if not self._user:
            return f"{WORD_START}?{within}+|{WORD_START}"
        user = "|".join(map(re.escape, sorted(self._user, key=len, reverse=True)))  # try longer symbols first
        return f"{user}|{WORD_START}?(?:(?!{user}){within})+|{WORD_START}"

    def draw(self, text: str, alpha: float, seed: int) -> list[int]:
        """Segment a line, which SentencePiece has normalised, into token ids without </s>."""
        ids = self._draw(self._units(text), alpha, Random(seed).random)
        if self._unknown not in ids:
            return ids
        return [i for i, previous in zip(ids, [-1, *ids], strict=False) if not i == previous == self._unknown]

    @abstractmethod
    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        """Segment words and user-defined symbols into token ids."""

    def _symbol(self, text: str) -> Ids:
        """Look up the id of a piece. Other text gets the ids of its bytes, or <unk> if the model has no byte pieces."""
        piece = self._ids.get(text, self._user.get(text))
        if piece is not None:
            return (piece,)
        return tuple(self._bytes[byte] for byte in text.encode()) if self._bytes else (self._unknown,)


class _Merged(NamedTuple):
    """A segmented word."""

    ids: Ids
    attempts: int  # number of pairs of symbols that were merged or skipped


class BpeSampler(Sampler):
    """BPE-dropout (Provilkov et al. 2020) as in SentencePiece: each attempt takes the pair of symbols with the best
    score, the leftmost if several are equal, and merges it. With probability alpha, it instead skips the pair until
    one of the two symbols changes."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        self._cached = lru_cache(CACHED_WORDS)(self._merge)

    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        ids: list[int] = []
        gaps = _gaps(alpha, uniform)
        next_skip = next(gaps)  # number of the next attempt that is skipped, from 0 at the start of the word
        for unit in units:
            if len(unit) > LONGEST_CACHED:
                word, next_skip = self._draw_long(unit, next_skip, gaps)
            else:
                skips: tuple[float, ...] = ()
                word = self._cached(unit, skips)
                while next_skip < word.attempts:
                    skips += (next_skip,)
                    next_skip += 1 + next(gaps)
                    word = self._cached(unit, skips)
            next_skip -= word.attempts
            ids += word.ids
        return ids

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
    """Yield how many merges succeed before each skip, drawn from a geometric distribution.

    This is equivalent to one draw for each attempt, but most words need no draw.
    """
    if not alpha:
        yield math.inf
    log_success = math.log1p(-alpha) if alpha < 1 else -math.inf
    while True:
        yield math.log(1 - uniform()) // log_success


class _Ending(NamedTuple):
    """The pieces that may end at a position of a word."""

    cumulative: list[float]  # cumulative probabilities of the pieces, without the last, which is 1
    starts: list[int]  # position where each piece starts
    ids: list[Ids]  # token ids of each piece, in reverse order


class UnigramSampler(Sampler):
    """Subword regularisation (Kudo 2018) by forward filtering and backward sampling.

    The probability of a segmentation is proportional to its probability in the model to the power of alpha.
    """

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        self._longest = max(map(len, self._ids), default=0)
        self._unknown_score = min(self._scores.values(), default=0.0) - 10  # SentencePiece's score of unknown text
        self._cached = lru_cache(CACHED_WORDS)(self._endings)

    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        ids: list[int] = []
        for unit in reversed(units):
            endings = self._cached(unit, alpha) if len(unit) <= LONGEST_CACHED else self._endings(unit, alpha)
            position = len(endings)
            while position:
                ending = endings[position - 1]
                choice = bisect(ending.cumulative, uniform()) if ending.cumulative else 0
                ids += ending.ids[choice]
                position = ending.starts[choice]
        ids.reverse()
        return ids

    def _endings(self, unit: str, alpha: float) -> list[_Ending]:
        """Find the pieces that may end after each character of a word. `_draw` reads the result from last to first."""
        if unit in self._user:
            return [_Ending([], [0], [(self._user[unit],)])]
        # For each position: log of the sum of p ** alpha over all segmentations of unit[:position], where p is the
        # probability of the segmentation in the model.
        log_sums = [0.0]
        endings = []
        for end in range(1, len(unit) + 1):
            starts = [i for i in range(max(0, end - self._longest), end - 1) if unit[i:end] in self._scores]
            starts.append(end - 1)
            texts = [unit[start:end] for start in starts]
            logs = [
                log_sums[start] + alpha * self._scores.get(text, self._unknown_score)
                for start, text in zip(starts, texts, strict=True)
            ]
            largest = max(logs)
            weights = [math.exp(log - largest) for log in logs]
            total = math.fsum(weights)
            cumulative = list(itertools.accumulate(weight / total for weight in weights[:-1]))
            log_sums.append(largest + math.log(total))
            endings.append(_Ending(cumulative, starts, [self._symbol(text)[::-1] for text in texts]))
        return endings
