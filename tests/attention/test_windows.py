"""Where windows lie, and what of them is read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.attention.attention import Attention, LocalMonotonicWindow, LocalPredictiveWindow
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import DotScore

VALID = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])


def uniform(reach: int) -> Attention:
    """Equal energies: the weights show the window."""
    return Attention(DotScore(), LocalMonotonicWindow(reach), SoftmaxNormalizer())


def test_local_m_is_centred_on_the_step_and_stays_at_the_last_word() -> None:
    centre = LocalMonotonicWindow(2).centres(torch.zeros(2, 4, 1), VALID, range(2, 6))
    assert centre.tolist() == [[2, 3, 4, 5], [2, 3, 3, 3]]


@pytest.mark.parametrize("reach", [1, 3])  # gathered, masked
def test_a_window_holds_reach_positions_on_either_side_less_beyond_the_ends(reach: int) -> None:
    attention = uniform(reach)
    weights = attention.sequence(
        torch.zeros(2, 9, 1), attention.remember(torch.zeros(2, 9, 1), VALID), attention.start(VALID)
    ).weights
    for b, length in enumerate((9, 4)):
        for t in range(9):
            middle = min(t, length - 1)
            held = range(max(0, middle - reach), min(length, middle + reach + 1))
            assert weights[b, t].nonzero().flatten().tolist() == list(held)
            torch.testing.assert_close(weights[b, t, list(held)], torch.full((len(held),), 1 / len(held)))


def test_local_p_predicts_a_share_of_the_sentence() -> None:
    window = LocalPredictiveWindow(2, 3, 4)
    with torch.no_grad():
        window.position.weight.zero_()
    centre = window.centres(torch.randn(2, 3, 3), VALID, range(3))
    assert centre.tolist() == [[4.5] * 3, [2.0] * 3]


def test_local_p_stays_within_the_sentence_for_any_query() -> None:
    window = LocalPredictiveWindow(2, 3, 4)
    with torch.no_grad():
        window.position.weight.mul_(1000)
    centre = window.centres(torch.randn(2, 50, 3) * 100, VALID, range(50))
    assert (centre >= 0).all()
    assert (centre <= torch.tensor([[9.0], [4.0]])).all()


@pytest.mark.parametrize("reach", [1, 2, 5])
def test_the_gaussian_is_one_at_the_centre_and_has_half_the_reach_as_deviation(reach: int) -> None:
    offsets = torch.tensor([[[0.0, reach / 2, -reach / 2, reach, -reach]]]).double()
    expected = torch.tensor([[[0.0, -0.5, -0.5, -2.0, -2.0]]]).double().exp()
    torch.testing.assert_close(LocalPredictiveWindow(reach, 2, 2).falloff(offsets), expected)


def test_local_m_has_no_falloff() -> None:
    assert LocalMonotonicWindow(2).falloff(torch.zeros(1, 1, 3)) is None


@pytest.mark.parametrize("reach", [1, 3])  # gathered, masked
def test_the_predicted_position_is_learned_through_the_gaussian(reach: int) -> None:
    window = LocalPredictiveWindow(reach, 1, 2)
    attention = Attention(DotScore(), window, SoftmaxNormalizer())
    states = torch.randn(2, 9, 1)
    attended = attention.sequence(torch.ones(2, 1, 1), attention.remember(states, VALID), attention.start(VALID))
    attended.context.sum().backward()
    for parameter in window.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()


def test_predicted_positions_are_not_rounded_to_reduced_precision() -> None:
    """bfloat16 would not know one position from the next in a sentence of 300 words."""
    window = LocalPredictiveWindow(2, 3, 4).bfloat16()
    valid = torch.ones(1, 300, dtype=torch.bool)
    assert window.centres(torch.randn(1, 2, 3).bfloat16(), valid, range(2)).dtype == torch.float32


@given(
    centre=st.one_of(st.floats(0, 1), st.integers(0, 12).map(lambda i: i / 12)),
    length=st.integers(4, 30),
    reach=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_what_is_read_is_in_the_sentence_and_has_all_within_reach(centre: float, length: int, reach: int) -> None:
    attention = uniform(reach)
    if length < 2 * reach + 2:
        return
    where = torch.tensor([[centre * length]], dtype=torch.float64)
    positions = attention.window.positions(where, length).flatten().tolist()
    assert positions == list(range(positions[0], positions[0] + 2 * reach + 2))
    assert positions[0] >= 0
    assert positions[-1] < length
    assert {s for s in range(length) if abs(s - float(where)) <= reach} <= set(positions)
