"""Rank correlation against a count over pairs, masking curves and their areas, means with intervals."""

from itertools import combinations

import numpy as np
import pytest

from nmt.explain.masking_curves import (
    MASKS,
    Mean,
    areas,
    combined,
    kendall_tau,
    masking_curves,
    masking_order,
    mean_over_tokens,
)


def counted_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Tau-b by its definition, pair by pair."""
    concordant = discordant = ties_first = ties_second = pairs = 0
    for i, j in combinations(range(len(first)), 2):
        pairs += 1
        ties_first += first[i] == first[j]
        ties_second += second[i] == second[j]
        if first[i] == first[j] or second[i] == second[j]:
            continue
        if (first[i] < first[j]) == (second[i] < second[j]):
            concordant += 1
        else:
            discordant += 1
    scale = ((pairs - ties_first) * (pairs - ties_second)) ** 0.5
    return (concordant - discordant) / scale if scale else float("nan")


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("values", [2, 4, 1000])  # few values: many ties
def test_tau_is_that_of_a_count_over_pairs(size: int, values: int) -> None:
    first, second = np.random.default_rng(size).integers(values, size=(2, 20, size)) / values
    expected = [counted_tau(*rows) for rows in zip(first, second, strict=True)]
    np.testing.assert_allclose(kendall_tau(first, second), expected)


def test_tau_of_equal_and_reversed_orders() -> None:
    rows = np.random.default_rng(0).random((3, 7))
    np.testing.assert_allclose(kendall_tau(rows, 2 * rows + 1), 1)
    np.testing.assert_allclose(kendall_tau(rows, -rows), -1)
    assert np.isnan(kendall_tau(rows, np.ones((3, 7)))).all()


def test_the_product_of_two_distributions() -> None:
    found = combined(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), np.array([[0.6, 0.2, 0.2], [0.0, 0.5, 0.5]]))
    np.testing.assert_allclose(found, [[0.75, 0.25, 0], [0, 0, 0]])


def test_tokens_are_masked_by_falling_weight_and_equal_ones_at_random() -> None:
    weights = np.array([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    random = np.array([[0.1, 0.2, 0.3], [0.9, 0.5, 0.2], [0.9, 0.1, 0.2]])
    assert masking_order(weights, random).tolist() == [[1, 2, 0], [1, 2, 0], [1, 2, 0]]
    assert masking_order(np.zeros((1, 9)), np.arange(9.0)[None, ::-1]).tolist() == [[8, 7, 6, 5, 4]]


def test_curves_start_at_one_and_stay_between_zero_and_one() -> None:
    unmasked = np.log([0.8, 0.2])
    masked = np.log([[0.4, 0.2], [0.6, 0.1]])
    curves = masking_curves(masked, unmasked)
    np.testing.assert_allclose(curves, [[1, 0.5, *[0.25] * (MASKS - 1)], [1, 1, *[0.5] * (MASKS - 1)]])
    assert masking_curves(np.full((1, 1), -np.inf), np.zeros(1)).tolist() == [[1.0, *[0.0] * MASKS]]


def test_areas_lie_between_those_of_the_fastest_fall_and_of_none() -> None:
    collapse, none, linear = [1.0, *[0.0] * MASKS], [1.0] * (MASKS + 1), np.linspace(1, 0, MASKS + 1)
    np.testing.assert_allclose(areas(np.array([collapse, none, linear])), [1 / (2 * MASKS), 1, 0.5])
    curves = masking_curves(np.random.default_rng(1).normal(0, 5, (50, MASKS)), np.zeros(50))
    assert ((areas(curves) >= 1 / (2 * MASKS)) & (areas(curves) <= 1)).all()
    np.testing.assert_allclose(areas(curves), np.trapezoid(curves, dx=1 / MASKS, axis=1))


def test_the_mean_is_over_tokens_and_its_interval_over_sentences() -> None:
    nan = float("nan")
    found = mean_over_tokens([np.array([1.0, nan, 2.0]), np.array([nan]), np.array([6.0])])
    assert found is not None
    assert found.mean == pytest.approx(3)
    # Residuals of the sums: 3 - 2 * 3 and 6 - 3; two sentences, three tokens.
    assert found.interval == pytest.approx(1.96 * (2 * (9 + 9) / 9) ** 0.5)
    assert mean_over_tokens([np.array([nan])]) is None
    assert mean_over_tokens([np.array([0.5, 0.75])]) == Mean(0.625, None)


def test_the_interval_covers_the_mean_of_all_sentences() -> None:
    rng, covered = np.random.default_rng(3), 0
    for _ in range(300):  # sentences of 1 to 9 tokens, whose tokens share most of their deviation; the mean is 0
        sample = [rng.normal() + rng.normal(0, 0.3, rng.integers(1, 10)) for _ in range(60)]
        found = mean_over_tokens(sample)
        assert found is not None
        assert found.interval is not None
        covered += abs(found.mean) < found.interval
    assert 0.9 < covered / 300 < 0.99
