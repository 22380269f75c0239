"""Segmentations drawn at random: BPE-dropout and subword regularisation, the same for a seed in every process.

SentencePiece draws them too, but from a generator whose draws differ from process to process whatever its seed, so that
no run could be repeated or resumed. Here a line's segmentation depends on the model, the line and its seed alone.
"""

import itertools
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterator
from functools import lru_cache
from random import Random
from typing import NamedTuple

from nmt.data import pieces

SPACE = "▁"  # what SentencePiece writes for a space
CACHED_WORDS, LONGEST_CACHED = 2**15, 32  # words recur; longer ones are rare and take much memory
NEVER = -math.inf  # score of a pair that is not merged

Ids = tuple[int, ...]
Uniform = Callable[[], float]


def sampler(model: bytes) -> "Sampler | None":
    """None if segmentations cannot be drawn: the model is of words or characters, or BPE that does not use all its pieces
    (SentencePiece takes these apart again in a way that depends on the rest of the line)."""
    found = pieces.read(model)
    if found.kind == pieces.UNIGRAM:
        return UnigramSampler(found.pieces)
    if found.kind == pieces.BPE and not any(piece.type == pieces.UNUSED for piece in found.pieces):
        return BpeSampler(found.pieces)
    return None


class Sampler(ABC):
    """Cuts a normalised line into words, draws each word's pieces, and joins runs of unknown characters."""

    def __init__(self, all_pieces: list[pieces.Piece]) -> None:
        of_type: dict[int, dict[str, int]] = {kind: {} for kind in range(1, 7)}
        for i, piece in enumerate(all_pieces):
            of_type[piece.type][piece.text] = i
        self._ids, self._user = of_type[pieces.NORMAL], of_type[pieces.USER_DEFINED]
        self._scores = {piece.text: piece.score for piece in all_pieces if piece.type == pieces.NORMAL}
        self._longest = max(map(len, self._ids), default=0)
        self._unknown = next(iter(of_type[pieces.UNKNOWN].values()))
        self._bytes = [of_type[pieces.BYTE].get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        self._spells_bytes = bool(of_type[pieces.BYTE])
        self._units = re.compile(self._unit_pattern(), re.DOTALL).findall

    def _unit_pattern(self) -> str:
        """User-defined symbols, which stay whole, and words: all that no piece reaches beyond."""
        user = "|".join(map(re.escape, sorted(self._user, key=len, reverse=True)))
        within = "." if any(SPACE in piece[1:] for piece in self._ids) else f"[^{SPACE}]"
        word = f"{SPACE}?(?:{within})+|{SPACE}"
        return f"{user}|{SPACE}?(?:(?!{user}){within})+|{SPACE}" if user else word

    def draw(self, text: str, alpha: float, seed: int) -> list[int]:
        """A line in SentencePiece's normalised form -> ids, without </s>."""
        ids = self._draw(self._units(text), alpha, Random(seed).random)
        if self._spells_bytes or self._unknown not in ids:
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
        return tuple(self._bytes[byte] for byte in text.encode()) if self._spells_bytes else (self._unknown,)


class _Merging(NamedTuple):
    """A word, how it begins and how it ends where no merge is skipped."""

    symbols: list[str]
    scores: list[float]  # of the pairs of neighbours, or NEVER
    ids: Ids
    merges: int


class BpeSampler(Sampler):
    """BPE-dropout (Provilkov et al. 2020), as in SentencePiece: the pair with the best score is merged first, the leftmost
    among equals; with probability alpha it is passed over instead, until one of its symbols changes."""

    def __init__(self, all_pieces: list[pieces.Piece]) -> None:
        super().__init__(all_pieces)
        self._cached = lru_cache(CACHED_WORDS)(self._word)

    def _draw(self, units: list[str], alpha: float, uniform: Uniform) -> list[int]:
        ids: list[int] = []
        gaps = _gaps(alpha, uniform)
        gap = next(gaps)
        for unit in units:
            word = self._cached(unit) if len(unit) <= LONGEST_CACHED else self._word(unit)
            if word.merges <= gap:
                gap -= word.merges
                ids += word.ids
            else:
                symbols, gap = self._merge(word.symbols, word.scores, gap, gaps)
                for symbol in symbols:
                    ids += self._symbol(symbol)
        return ids

    def _word(self, unit: str) -> _Merging:
        symbols = [unit] if unit in self._user else list(unit)
        scores = [self._scores.get(left + right, NEVER) for left, right in zip(symbols, symbols[1:], strict=False)]
        merged, _ = self._merge(symbols, scores, math.inf, iter(()))
        ids = tuple(i for symbol in merged for i in self._symbol(symbol))
        return _Merging(symbols, scores, ids, len(symbols) - len(merged))

    def _merge(
        self, symbols: list[str], scores: list[float], gap: float, gaps: Iterator[float]
    ) -> tuple[list[str], float]:
        """The symbols in the end, and what is left of the gap."""
        symbols, scores = symbols.copy(), scores.copy()
        score_of = self._scores.get
        while scores and (best := max(scores)) != NEVER:
            i = scores.index(best)
            if not gap:
                scores[i] = NEVER
                gap = next(gaps)
                continue
            gap -= 1
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            del scores[i]
            if i:
                scores[i - 1] = score_of(symbols[i - 1] + symbols[i], NEVER)
            if i < len(scores):
                scores[i] = score_of(symbols[i] + symbols[i + 1], NEVER)
        return symbols, gap


def _gaps(alpha: float, uniform: Uniform) -> Iterator[float]:
    """How many merges are made before one is skipped with probability alpha, again and again: a draw for each gap is
    as good as one for each merge, and most words then need none."""
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

    def __init__(self, all_pieces: list[pieces.Piece]) -> None:
        super().__init__(all_pieces)
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
