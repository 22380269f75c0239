"""Statistics of attention weights."""

import math

import numpy as np
import pytest

from nmt.explain.explanation import attention_statistics

ONE_HOT = np.eye(4)[[0, 2, 1, 3]]


def test_entropy_is_log_s_where_all_are_alike_and_zero_where_one_is_chosen() -> None:
    assert attention_statistics([np.full((3, 8), 1 / 8)]).entropy == pytest.approx(math.log(8))
    assert attention_statistics([ONE_HOT]).entropy == 0


def test_means_are_over_rows_not_sentences() -> None:
    ends = np.tile([0.0, 1.0], (1, 1)), np.tile([1.0, 0.0], (3, 1))
    assert attention_statistics(ends).on_end == pytest.approx(1 / 4)


def test_rows_count_by_their_shares_and_not_at_all_without_weight() -> None:
    found = attention_statistics([np.array([[0.25, 0.25], [0.0, 0.0]])])
    assert found.entropy == pytest.approx(math.log(2))
    assert found.on_end == pytest.approx(0.5)
    assert attention_statistics([np.zeros((2, 3))]) == (0, 0)
