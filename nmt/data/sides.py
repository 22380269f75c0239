"""Do the two sides of held-out text go with those of the training text? By character trigrams, knowing no language."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

SAMPLE = 2_000  # pairs of a split that are looked at
MOST = 0.5  # share of a held-out split's lines from which on their side is in doubt
LEAST = 10  # of a held-out split, to say anything
SURE = 0.9  # share of training lines, on each side, whose side must be guessed right; else the sides are too alike
LONGEST = 300  # characters of a line that are looked at

Sample = Sequence[tuple[str, str]]


class Sides:
    """Guesses which side of the training text a line is of: naive Bayes with add-one smoothing."""

    def __init__(self, train: Sample) -> None:
        """Learns from every other pair, and tries itself on the rest."""
        counts = [Counter(trigram for pair in train[::2] for trigram in _trigrams(pair[side])) for side in (0, 1)]
        kinds = len(counts[0] | counts[1])
        sizes = [math.log(count.total() + kinds) if kinds else 0.0 for count in counts]
        self._odds = {  # logarithm of p(trigram | source) / p(trigram | target); 0 for one never seen
            trigram: math.log1p(counts[0][trigram]) - sizes[0] - math.log1p(counts[1][trigram]) + sizes[1]
            for trigram in counts[0] | counts[1]
        }
        self.sure = len(train) >= LEAST and max(self._strangers(train[1::2])) <= 1 - SURE

    def fault(self, held_out: Sample) -> str | None:
        """What is wrong with most lines of a held-out split, if anything is."""
        if not self.sure or len(held_out) < LEAST:
            return None
        strange = [share > MOST for share in self._strangers(held_out)]
        if all(strange):
            return "its sides look swapped: most sources read like train's targets, most targets like train's sources"
        for side, here, there in ((0, "sources", "targets"), (1, "targets", "sources")):
            if strange[side]:
                return f"most of its {here} read like train's {there}; is it the right language?"
        return None

    def _strangers(self, pairs: Sample) -> tuple[float, float]:
        """The shares of the sources and of the targets that read like the other side."""
        source, target = (
            sum(sign * sum(self._odds.get(trigram, 0.0) for trigram in _trigrams(pair[side])) < 0 for pair in pairs)
            for side, sign in ((0, 1), (1, -1))
        )
        return source / max(1, len(pairs)), target / max(1, len(pairs))


def _trigrams(line: str) -> Iterator[str]:
    text = f" {line[:LONGEST].lower()} "
    return (text[i : i + 3] for i in range(len(text) - 2))
