"""Learning rate schedules as functions of the step."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from nmt.config import schema
from nmt.training.schedule import Schedule


def schedule(total: int = 100, **values: Any) -> Schedule:  # noqa: ANN401
    return Schedule(TypeAdapter(schema.Schedule).validate_python(values), total)


def test_constant_warms_up_linearly_then_stays() -> None:
    constant = schedule(kind="constant", warmup_steps=4)
    assert [constant.factor(step) for step in (1, 2, 4, 5, 99)] == [0.25, 0.5, 1, 1, 1]


def test_inverse_sqrt_peaks_at_the_end_of_the_warmup() -> None:
    inverse = schedule(kind="inverse_sqrt", warmup_steps=10)
    assert inverse.factor(5) == 0.5
    assert inverse.factor(10) == 1
    assert inverse.factor(40) == pytest.approx(0.5)


def test_cosine_falls_from_the_peak_to_its_minimum() -> None:
    cosine = schedule(kind="cosine", warmup_steps=20, min_factor=0.1)
    factors = [cosine.factor(step) for step in range(20, 101)]
    assert factors[0] == 1
    assert cosine.factor(60) == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)
    assert cosine.factor(500) == pytest.approx(0.1)


def test_step_decay_halves_after_its_start() -> None:
    decay = schedule(kind="step", warmup_steps=0, start=10, every=5, factor=0.5)
    assert [decay.factor(step) for step in (1, 10, 11, 15, 16, 21)] == [1, 1, 0.5, 0.5, 0.25, 0.125]


def test_plateau_reduces_when_patience_is_over() -> None:
    plateau = schedule(kind="plateau", warmup_steps=0, factor=0.5, patience=1, min_factor=0.2)
    seen = []
    for improved in (True, False, False, False, False, False, False):
        plateau.observe(improved)
        seen.append(plateau.factor(9))
    assert seen == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2]


def test_an_improvement_resets_the_patience() -> None:
    plateau = schedule(kind="plateau", warmup_steps=0, factor=0.5, patience=1, min_factor=0.0)
    for improved in (False, True, False, True, False):
        plateau.observe(improved)
    assert plateau.factor(1) == 1


def test_state_goes_with_a_checkpoint() -> None:
    one, other = (schedule(kind="plateau", warmup_steps=0, factor=0.5, patience=0, min_factor=0.0) for _ in range(2))
    one.observe(False)
    other.load_state_dict(one.state_dict())
    assert other.factor(3) == one.factor(3) == 0.5
