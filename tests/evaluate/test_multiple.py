"""Holm's correction and compact letters, on made-up comparisons with known answers."""

from itertools import combinations

import numpy as np
import pytest

from nmt.evaluate.multiple import holm, letters


def test_holm_multiplies_step_by_step_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm 1979
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("count", "different", "expected"),
    [
        (3, [], ["a", "a", "a"]),
        (3, [(0, 1), (0, 2), (1, 2)], ["a", "b", "c"]),
        (3, [(0, 2)], ["a", "ab", "b"]),
        (4, [(0, 2), (0, 3), (1, 3)], ["a", "ab", "bc", "c"]),  # overlapping groups
        (5, [(0, 3), (0, 4), (1, 4)], ["a", "ab", "abc", "bc", "c"]),
        (3, [(0, 1)], ["a", "b", "ab"]),  # an uncertain system at the end belongs to both
        (4, [(0, 1), (2, 3)], ["ab", "cd", "ac", "bd"]),
        (1, [], ["a"]),
    ],
)
def test_systems_share_a_letter_unless_they_differ(
    count: int, different: list[tuple[int, int]], expected: list[str]
) -> None:
    assert letters(count, different) == expected
    assert letters(count, [pair[::-1] for pair in different[::-1]]) == expected


def test_letters_say_exactly_which_pairs_differ() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        scores, errors = np.sort(rng.random(12)), rng.choice([0.05, 0.1, 0.3], 12)
        different = [(i, j) for i, j in combinations(range(12), 2) if scores[j] - scores[i] > errors[i] + errors[j]]
        names = letters(12, different)
        for i, j in combinations(range(12), 2):
            assert ((i, j) in different) == (not set(names[i]) & set(names[j]))


def test_beyond_the_alphabet_letters_have_numbers() -> None:
    names = letters(60, list(combinations(range(60), 2)))
    assert names[:2] == ["a", "b"]
    assert (names[26], names[52]) == ("A", "a2")
    assert len(set(names)) == 60
