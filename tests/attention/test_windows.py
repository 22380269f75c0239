"""Where windows lie; a window read alone equals a window under a mask, in values and gradients."""

import pytest
import torch
from combinations import CHOSEN, LOCAL, AnyAttention, Case, choices
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import slow_but_pairwise
from torch import Tensor

from nmt.attention.attention import Attention, LocalMonotonicWindow, LocalPredictiveWindow, Window
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import DotScore, LocationScore

VALID = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])


def uniform(reach: int) -> Attention:
    """Equal energies: the weights show the window."""
    return Attention(DotScore(), LocalMonotonicWindow(reach), SoftmaxNormalizer())


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


CASES = [Case(name, lengths=(3, 11, 6), steps=12, reach=2, padding=1) for name in LOCAL] + [
    Case(name, lengths=(4, 1, 3), steps=5)
    for name in LOCAL
    if name in CHOSEN  # as long as the window is wide
]


def everything(attention: AnyAttention, query: Tensor, states: Tensor, valid: Tensor) -> list[Tensor]:
    """Context, weights, and the gradients of numbers that depend on all of both; parts that have none are zero."""
    query, states = (part.clone().requires_grad_() for part in (query, states))
    attended = attention.sequence(query, attention.remember(states, valid), attention.start(valid))
    inputs = [query, states, *attention.parameters()]
    loss = (attended.context.sin().mean(-1) * attended.weights.cos().sum(-1)).mean()
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [attended.context.detach(), attended.weights.detach(), *gradients]


@pytest.mark.parametrize(
    "case",
    slow_but_pairwise(CASES, lambda case: [*choices(case.name), case.lengths]),
    ids=lambda case: f"{case.name}-{max(case.lengths)}",
)
def test_reading_windows_equals_masking(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case.make()
    found = []
    for gathers in (True, False):
        monkeypatch.setattr(Window, "narrows", lambda self, length, gathers=gathers: gathers)
        found.append(everything(*made))
    for gathered, masked in zip(*found, strict=True):
        torch.testing.assert_close(gathered, masked, rtol=0, atol=1e-10)


def test_positions_beyond_256_are_read_as_they_are_in_reduced_precision() -> None:
    """bfloat16 has no odd numbers there."""
    attention = Attention(LocationScore(4, 400), LocalMonotonicWindow(2), SoftmaxNormalizer())
    states, valid = torch.randn(1, 300, 4), torch.ones(1, 300, dtype=torch.bool)
    query = torch.randn(1, 300, 4)
    with torch.autocast("cpu", torch.bfloat16):
        memory = attention.remember(states, valid)
        weights = attention.sequence(query, memory, attention.start(valid)).weights
        energies = attention.score(query, memory.keys)
    for t in (256, 257, 259):
        window = slice(t - 2, t + 3)
        torch.testing.assert_close(weights[0, t, window], energies[0, t, window].float().softmax(-1))
