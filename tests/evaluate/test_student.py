"""Student's t distribution against printed tables and closed forms."""

import math

import pytest

from nmt.evaluate.student import t_p_value, t_quantile


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (120, 1.980)])
def test_quantiles_are_those_of_printed_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 20.0, -2.5])
def test_p_values_are_those_of_the_closed_forms(t: float) -> None:
    assert t_p_value(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(abs(t)))
    assert t_p_value(t, 2) == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t))
    assert t_p_value(t, 1e6) == pytest.approx(math.erfc(abs(t) / math.sqrt(2)), rel=2e-2, abs=1e-30)


@pytest.mark.parametrize("freedom", [1, 1.37, 2.9, 40, 5e4])
def test_quantiles_invert_p_values(freedom: float) -> None:
    for probability in (0.5, 0.8, 0.975, 0.9999):
        assert t_p_value(t_quantile(probability, freedom), freedom) == pytest.approx(2 * (1 - probability))
    assert t_p_value(1.7, freedom + 1) < t_p_value(1.7, freedom)
