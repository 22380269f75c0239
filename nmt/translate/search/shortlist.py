"""A lexical shortlist: the target tokens that a search may use for these source sentences.

Shapes: L tokens of a shortlist, V target vocabulary.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nmt.translate.search.log_probs import BLOCK

Ids = NDArray[np.int64]
MIN_COUNT = 0.3  # of a pair of tokens in the training corpus
MOST = 0.75  # of the vocabulary; a longer shortlist saves nothing


class Shortlist:
    """For each source token the target tokens it is translated by, and the target tokens that every sentence may use:
    the special and the most frequent ones   (Jean et al. 2015, 3; Mi et al. 2016)."""

    def __init__(self, candidates: Ids, ends: Ids, always: Ids, size: int, sources: bool = False) -> None:
        """candidates: target tokens, those of source token s in [ends[s - 1], ends[s]); always: at least the special
        ones; size: V; sources: may a sentence use its source tokens? Raises ValueError if these do not fit together."""
        self.candidates, self.ends, self.always, self.size = candidates, ends, always, size
        self.sources = sources
        used = np.concatenate([candidates, always])
        if len(ends) == 0 or ends[-1] != len(candidates) or (np.diff(ends, prepend=0) < 0).any():
            raise ValueError("its table does not match its offsets")
        if used.min() < 0 or used.max() >= size:
            raise ValueError(f"it names tokens outside a vocabulary of {size}")

    @classmethod
    def from_counts(
        cls,
        pairs: Ids,
        counts: NDArray[np.float64],
        sizes: tuple[int, int],
        special: Sequence[int],
        per_token: int,
        frequent: int,
    ) -> Self:
        """pairs: int64 (N,), distinct, source token * V + target token; counts: (N,) of each, which may be expected
        ones; sizes: of both vocabularies. Every sentence may use the `special` and the `frequent` most frequent
        targets; of the others, the `per_token` most frequent ones of each source token count."""
        source, target = np.divmod(pairs, sizes[1])
        totals = np.bincount(target, counts, sizes[1])
        most = np.argsort(-totals, kind="stable")[:frequent]
        always = np.unique(np.concatenate([np.asarray(special, np.int64), most[totals[most] > 0]]))
        rare = ~np.isin(target, always) & (counts >= MIN_COUNT)
        source, target, counts = source[rare], target[rare], counts[rare]
        order = np.lexsort((target, -counts, source))
        source, target = source[order], target[order]
        rank = np.arange(len(source)) - np.searchsorted(source, source)
        kept = rank < per_token
        ends = np.cumsum(np.bincount(source[kept], minlength=sizes[0]))
        return cls(target[kept].astype(np.int64), ends.astype(np.int64), always, sizes[1])

    def with_sources(self) -> Self:
        """The same with the source tokens of each sentence, for a model that copies them: target tokens as well."""
        return type(self)(self.candidates, self.ends, self.always, self.size, sources=True)

    def of(self, source: Iterable[int]) -> Ids:
        """A source sentence's shortlist, int64 (L,), ascending."""
        tokens = set(source)
        parts = [self.candidates[self.ends[s - 1] if s else 0 : self.ends[s]] for s in tokens]
        own = np.array([*tokens] if self.sources else [], np.int64)
        return np.unique(np.concatenate([self.always, own, *parts]))

    def vocabulary(self, sources: Iterable[Iterable[int]], also: Sequence[int] = ()) -> Ids | None:
        """int64 (L,), ascending: the shortlists of several sentences and the tokens `also` together, with further
        tokens that make L a multiple of `BLOCK`, which spares a search copies; None if that is nearly all tokens."""
        ids = np.union1d(self.of({token for source in sources for token in source}), np.asarray(also, np.int64))
        if len(ids) > MOST * self.size - BLOCK:
            return None
        more = np.setdiff1d(np.arange(len(ids) + BLOCK), ids, assume_unique=True)[: -len(ids) % BLOCK]
        return np.sort(np.concatenate([ids, more]))

    def missing(self, sources: Sequence[Iterable[int]], targets: Sequence[Sequence[int]]) -> float:
        """The share of the target tokens that are not in the shortlist of their own source sentence."""
        absent = [~np.isin(target, self.of(source)) for source, target in zip(sources, targets, strict=True)]
        return float(np.concatenate(absent).mean()) if absent else 0.0

    def arrays(self) -> dict[str, Any]:
        """To be written to a file."""
        return {"candidates": self.candidates, "ends": self.ends, "always": self.always}
