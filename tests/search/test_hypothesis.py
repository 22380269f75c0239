import math
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.translate.search.hypothesis import LengthPenalty, Limits

Kind = Literal["none", "average", "gnmt"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALPHAS = st.floats(0, 3)


@given(ALPHAS, st.integers(1, 300))
def test_penalties_are_those_of_their_definitions(alpha: float, length: int) -> None:
    assert LengthPenalty("none", alpha)(length) == 1
    assert math.log(LengthPenalty("average", alpha)(length)) == pytest.approx(alpha * math.log(length))
    gnmt = math.log(LengthPenalty("gnmt", alpha)(length))
    assert gnmt == pytest.approx(alpha * (math.log(5 + length) - math.log(6)))


@given(st.sampled_from(KINDS), ALPHAS, st.integers(1, 300))
def test_penalties_never_fall(kind: Kind, alpha: float, length: int) -> None:
    penalty = LengthPenalty(kind, alpha)
    assert 1 <= penalty(length) <= penalty(length + 1)


@pytest.mark.parametrize("alpha", [-0.1, math.nan])
def test_a_negative_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=f"alpha is {alpha}"):
        LengthPenalty("average", alpha)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="min_length is -1"):
        Limits(-1, [3])
    with pytest.raises(ValueError, match="max_lengths holds 0"):
        Limits(0, [3, 0])
