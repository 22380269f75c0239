"""Learning rate schedules as functions of the step."""

import math
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.training.optimizer import Schedule


def schedule(total: int = 100, **values: Any) -> Schedule:  # noqa: ANN401
    if values["kind"] == "cosine":
        values = {"cycles": 1, "cycle_growth": 1.0, **values}
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


@pytest.mark.parametrize("growth", [1.0, 2.0])
@pytest.mark.parametrize("warmup", [0, 30])
def test_warm_restarts_go_back_to_the_peak_and_cycles_grow(growth: float, warmup: int) -> None:
    total = warmup + 210
    cosine = schedule(total, kind="cosine", warmup_steps=warmup, min_factor=0.1, cycles=3, cycle_growth=growth)
    factors = [cosine.factor(step) for step in range(max(1, warmup), total + 1)]
    if warmup:
        assert factors[0] == 1
        assert [cosine.factor(step) for step in (1, 15)] == [pytest.approx(step / warmup) for step in (1, 15)]
    rises = [step for step in range(warmup + 2, total + 1) if cosine.factor(step) > cosine.factor(step - 1)]
    assert [cosine.factor(step) for step in rises] == [1, 1]  # the peak itself, and no second warm-up
    assert all(cosine.factor(step - 1) < 0.11 for step in rises)
    ends = [warmup, *rises, total]
    lengths = [end - start for start, end in pairwise(ends)]
    assert lengths == ([70, 70, 70] if growth == 1 else [30, 60, 120])
    for start, length in zip(ends, lengths, strict=False):
        assert cosine.factor(start + length // 2) == pytest.approx(0.55)
    assert factors[-1] == pytest.approx(0.1)
    assert cosine.factor(total + 50) == pytest.approx(0.1)


def test_cycles_grow_as_near_as_whole_updates_can() -> None:
    cosine = schedule(1000, kind="cosine", warmup_steps=100, min_factor=0.0, cycles=5, cycle_growth=1.5)
    starts = [step for step in range(100, 1001) if cosine.factor(step) == 1]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], 1000], strict=True)]
    assert len(lengths) == 5
    first = 900 / sum(1.5**n for n in range(5))
    assert lengths == [pytest.approx(first * 1.5**n, abs=1) for n in range(5)]


def test_one_cycle_is_half_a_cosine_to_the_bit() -> None:
    """cycle_growth has nothing to make longer."""
    for growth in (1.0, 3.0):
        cosine = schedule(97, kind="cosine", warmup_steps=7, min_factor=0.02, cycle_growth=growth)
        for step in range(1, 120):
            progress = min(1.0, max(0, step - 7) / 90)
            share = 0.5 * (1 + math.cos(math.pi * progress))
            assert cosine.factor(step) == min(1.0, step / 7) * (0.02 + (1 - 0.02) * share)


@pytest.mark.parametrize(("cycles", "growth"), [(11, 1.0), (3, 3.0), (2, 100.0), (10_000, 1.0)])
def test_more_cycles_than_updates_are_refused(cycles: int, growth: float) -> None:
    with pytest.raises(
        UserError, match=rf"^schedule\.cycles={cycles}: .* one of the 10 updates .*schedule\.cycle_growth$"
    ):
        schedule(15, kind="cosine", warmup_steps=5, min_factor=0.0, cycles=cycles, cycle_growth=growth)
    short = schedule(5, kind="cosine", warmup_steps=5, min_factor=0.0)  # one cycle of a run that ends with its warm-up
    assert short.factor(5) == 1


def test_step_decay_halves_after_its_start() -> None:
    decay = schedule(kind="step", warmup_steps=0, start=10, every=5, factor=0.5)
    assert [decay.factor(step) for step in (1, 10, 11, 15, 16, 21)] == [1, 1, 0.5, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "constant", "warmup_steps": 4},
        {"kind": "inverse_sqrt", "warmup_steps": 4},
        {"kind": "cosine", "warmup_steps": 4, "min_factor": 0.0, "cycles": 1, "cycle_growth": 1.0},
        {"kind": "plateau", "warmup_steps": 4, "factor": 0.5, "patience": 0, "min_factor": 0.0},
    ],
)
def test_before_the_first_update_there_is_a_factor(values: dict[str, Any]) -> None:
    assert schedule(**values).factor(0) == 0


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
