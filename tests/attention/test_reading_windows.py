"""A window read alone is the same as a window masked, in values and gradients."""

import pytest
import torch
from combinations import CHOSEN, LOCAL, AnyAttention, Case, choices
from pairwise import slow_but_pairwise
from torch import Tensor

from nmt.attention.attention import Attention, LocalMonotonicWindow, Window
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import LocationScore

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


def test_only_windows_much_narrower_than_the_sentence_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for way in ("_attend_window", "_attend_all"):
        original = getattr(Attention, way)
        monkeypatch.setattr(Attention, way, lambda *args, f=original, way=way: used.append(way) or f(*args))
    for name, length in [("dot-local_p-softmax", 8), ("dot-local_p-softmax", 7), ("dot-global-softmax", 100)]:
        everything(*Case(name, lengths=(length,)).make())
    assert used == ["_attend_window", "_attend_all", "_attend_all"]


def test_gradients_go_through_selected_rows() -> None:
    attention, query, states, valid = Case("general-local_p-softmax", lengths=(12, 9, 3)).make()
    rows, states = torch.tensor([2, 2, 0]), states.requires_grad_()
    memory, past = attention.remember(states, valid), attention.start(valid)
    selected = attention.sequence(query[rows], memory.select(rows), past.select(rows)).context
    straight = attention.sequence(query[rows], attention.remember(states[rows], valid[rows]), past.select(rows)).context
    (found,), (expected,) = (torch.autograd.grad(context.square().sum(), [states]) for context in (selected, straight))
    torch.testing.assert_close(found, expected)


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
