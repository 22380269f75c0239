"""Many comparisons at once: Holm's correction (1979), and systems grouped by letters (Piepho 2004)."""

from collections.abc import Collection, Sequence
from string import ascii_letters


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values, corrected so that the probability of any false discovery below a limit is at most this limit.

    The i-th smallest of m is multiplied by m - i + 1, and raised to the corrected value of a smaller one.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[index]))
        corrected[index] = largest
    return corrected


def letters(count: int, different: Collection[tuple[int, int]]) -> list[str]:
    """Letters of each of `count` systems, which are numbered from 0 in the order of their rank.

    Two systems have a letter in common unless their pair is in `different`. Each letter marks a largest group of
    systems of which no two differ; the best system has "a".
    """
    groups = [frozenset(range(count))]
    for pair in different:
        split = [
            part for group in groups for part in ([group - {one} for one in pair] if {*pair} <= group else [group])
        ]
        groups = [group for group in dict.fromkeys(split) if not any(group < other for other in split)]
    groups.sort(key=sorted)
    names = [_letter(number) for number in range(len(groups))]
    return [
        "".join(name for name, group in zip(names, groups, strict=True) if system in group) for system in range(count)
    ]


def _letter(number: int) -> str:
    """a, b, ..., z, A, ..., Z, a2, b2, ..."""
    again, index = divmod(number, len(ascii_letters))
    return ascii_letters[index] + (str(again + 1) if again else "")
