"""A window read alone is the same as a window masked, in values and gradients; rows read from a pool."""

import pytest
import torch
from combinations import CHOSEN, LOCAL, AnyAttention, Case
from torch import Tensor

from nmt.attention.attention import Attention
from nmt.attention.gather import GradientPool

CASES = [Case(name, lengths=(3, 11, 6), steps=12, reach=2, padding=1) for name in LOCAL] + [
    Case(name, lengths=(4, 1, 3), steps=5)
    for name in LOCAL
    if name in CHOSEN  # as long as the window is wide
]


def everything(attention: AnyAttention, query: Tensor, states: Tensor, valid: Tensor) -> list[Tensor]:
    """Context, weights, and the gradients of numbers that depend on all of both; parts that have none are zero."""
    query, states = (part.clone().requires_grad_() for part in (query, states))
    attended = attention(query, attention.remember(states, valid), attention.start(valid))
    inputs = [query, states, *attention.parameters()]
    loss = (attended.context.sin().mean(-1) * attended.weights.cos().sum(-1)).mean()
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [attended.context.detach(), attended.weights.detach(), *gradients]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{max(case.lengths)}")
def test_reading_windows_equals_masking(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case.make()
    found = []
    for gathers in (True, False):
        monkeypatch.setattr(Attention, "_reads_windows", lambda self, length, gathers=gathers: gathers)
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


def test_there_are_pools_only_where_they_serve_a_gradient() -> None:
    attention, _, states, valid = Case("dot-local_m-softmax", lengths=(20,)).make()
    assert attention.remember(states, valid).pools is not None
    with torch.no_grad():
        assert attention.remember(states, valid).pools is None
    for name in ("dot-global-softmax", "dot-local_m-softmax-coverage"):
        attention, _, states, valid = Case(name, lengths=(20,)).make()
        assert attention.remember(states, valid).pools is None


def test_gradients_go_through_selected_rows() -> None:
    """Selecting leaves the pools behind."""
    attention, query, states, valid = Case("general-local_p-softmax", lengths=(12, 9, 3)).make()
    rows, states = torch.tensor([2, 2, 0]), states.requires_grad_()
    memory, past = attention.remember(states, valid), attention.start(valid)
    selected = attention(query[rows], memory.select(rows), past.select(rows)).context
    straight = attention(query[rows], attention.remember(states[rows], valid[rows]), past.select(rows)).context
    (found,), (expected,) = (torch.autograd.grad(context.square().sum(), [states]) for context in (selected, straight))
    torch.testing.assert_close(found, expected)


def read_twice(tensor: Tensor, pooled: bool) -> list[Tensor]:
    rows = [torch.tensor([0, 5, 5, 2]), torch.tensor([5, 1])]
    if pooled:
        pool = GradientPool(tensor)
        return [pool.read(index) for index in rows]
    return [tensor.flatten(0, 1)[index] for index in rows]


@pytest.mark.parametrize("used", [[0, 1], [0], [1]])
def test_a_pool_is_indexing(used: list[int]) -> None:
    """Whatever of what was read is used, and when the backward pass is run again."""
    tensor = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for pooled in (True, False):
        reads = read_twice(tensor * 2, pooled)
        loss = sum((reads[i].square().sum() for i in used), start=torch.zeros(()).double())
        for again in (True, False):
            gradients.append(torch.autograd.grad(loss, [tensor], retain_graph=again)[0])
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-12)
    for pooled_rows, rows in zip(read_twice(tensor, True), read_twice(tensor, False), strict=True):
        assert torch.equal(pooled_rows, rows)


def test_parts_of_a_loss_can_be_differentiated_one_after_the_other() -> None:
    tensor = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for pooled in (True, False):
        for read in read_twice(tensor, pooled):
            read.square().sum().backward()
        gradients.append(tensor.grad)
        tensor.grad = None
    torch.testing.assert_close(*gradients)


def test_a_pool_sums_gradients_of_reduced_precision_in_float32() -> None:
    """In bfloat16 the sum of ones stays at 256."""
    tensor = torch.zeros(1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    pool = GradientPool(tensor)
    reads = [pool.read(torch.tensor([1])) for _ in range(300)]
    (gradient,) = torch.autograd.grad(sum(reads, start=torch.zeros(1, 1)).sum(), [tensor])
    assert gradient.dtype == torch.bfloat16
    assert gradient.flatten().tolist() == [0, 300]
