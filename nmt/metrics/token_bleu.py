"""BLEU of single sentences over tokens of any kind: many candidates for one reference, fast."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

ORDER = 4


class TokenBLEU:
    """BLEU (Papineni et al. 2002) of candidates for one reference, as sacreBLEU takes it for a sentence: the n-th
    order without a match counts 1 / 2^k for the k-th such order, and no order longer than the candidate counts."""

    def __init__(self, reference: Sequence[Hashable]) -> None:
        self._length = len(reference)
        self._counts = [_ngrams(reference, n) for n in range(1, ORDER + 1)]

    def __call__(self, candidate: Sequence[Hashable]) -> float:
        """From 0 to 1."""
        if not candidate:
            return 0.0
        logarithms, halved, any_match = [], 1.0, False
        for n, wanted in enumerate(self._counts[: len(candidate)], 1):
            found = _ngrams(candidate, n)
            matches = sum(min(count, wanted[gram]) for gram, count in found.items() if gram in wanted)
            any_match = any_match or matches > 0
            if not matches:
                halved /= 2
            logarithms.append(math.log((matches or halved) / (len(candidate) - n + 1)))
        brevity = min(0.0, 1 - self._length / len(candidate))
        return math.exp(brevity + sum(logarithms) / len(logarithms)) if any_match else 0.0


def _ngrams(tokens: Sequence[Hashable], n: int) -> "Counter[tuple[Hashable, ...]]":
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False))
