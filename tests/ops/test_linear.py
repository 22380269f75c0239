"""Products whose operand's gradient is made after the loop, against autograd's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nmt.ops import linear as module
from nmt.ops.linear import Linear, linear, product
from nmt.ops.shared import loop

STEPS = 4


def several(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], inputs, weight.mT)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "matrix": (linear, F.linear, [(5, 3), (4, 3), (4,)]),
    "matrix without bias": (linear, F.linear, [(5, 3), (4, 3)]),
    "matrix on more dimensions": (linear, F.linear, [(2, 5, 3), (4, 3), (4,)]),
    "several": (linear, several, [(2, 5, 3), (2, 4, 3), (2, 4)]),
    "several without bias": (linear, lambda x, w: torch.bmm(x, w.mT), [(2, 5, 3), (2, 4, 3)]),
    "product": (product, torch.bmm, [(2, 5, 3), (2, 3, 4)]),
}


def gradients(operation: Callable[..., Tensor], first: Tensor, operands: list[Tensor]) -> list[Tensor]:
    """Of a recurrence of several steps, with respect to everything."""
    state, outputs = first, []
    with loop():
        for _ in range(STEPS):
            outputs.append(operation(state, *operands))
            state = torch.tanh(state + outputs[-1].mean(-1, keepdim=True))
    loss = torch.stack(outputs).sin().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [first, *operands])]


@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str) -> None:
    ours, plain, shapes = CASES[name]
    first, *operands = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    for found, expected in zip(
        gradients(ours, first, list(operands)), gradients(plain, first, list(operands)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_is_plain_without_loop_or_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "defer_gradient", lambda *_: pytest.fail("shared"))
    ours, plain, shapes = CASES[name]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    torch.testing.assert_close(ours(*tensors), plain(*tensors))
    with loop(), torch.no_grad():
        torch.testing.assert_close(ours(*tensors), plain(*tensors))


@pytest.mark.parametrize(("most", "products"), [(10**6, 1), (30, 2), (1, STEPS)])
def test_a_loop_makes_few_products_for_the_gradient_of_a_weight(
    most: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, or as many as memory asks for (a step leaves twelve numbers); their sum is the same."""
    made = []
    original = module.weight_gradient
    monkeypatch.setattr(module, "weight_gradient", lambda *each: made.append(1) or original(*each))
    monkeypatch.setattr(module, "PENDING_ELEMENTS", most)
    layer = Linear(3, 3).double()
    inputs = torch.randn(2, 3, dtype=torch.float64)

    def gradients() -> tuple[Tensor, ...]:
        state = inputs
        with loop():
            for _ in range(STEPS):
                state = layer(state)
        return torch.autograd.grad(state.sum(), [layer.weight, layer.bias])

    found = gradients()
    assert len(made) == products
    monkeypatch.setattr(module, "PENDING_ELEMENTS", 10**6)
    for ours, whole in zip(found, gradients(), strict=True):
        torch.testing.assert_close(ours, whole)


def test_second_derivatives_are_refused() -> None:
    inputs, weight = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    with loop():
        outputs = linear(inputs, weight).sin()
    (gradient,) = torch.autograd.grad(outputs.sum(), [inputs], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_two_weights_are_kept_apart() -> None:
    weights = [torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs = torch.randn(2, 3, dtype=torch.float64)

    def loss(operation: Callable[..., Tensor]) -> Tensor:
        state = inputs
        with loop():
            for _ in range(STEPS):
                state = operation(operation(state, weights[0]).tanh(), weights[1])
        return state.sum()

    for found, expected in zip(*(torch.autograd.grad(loss(f), weights) for f in (linear, F.linear)), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_loop_ends_where_it_is_left() -> None:
    """A second loop over the same weight has a gradient of its own."""
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(2, 3, dtype=torch.float64)
    outputs = []
    for _ in range(2):
        with loop(), loop():
            outputs.append(linear(inputs, weight))
    (once,) = torch.autograd.grad(outputs[0].sum(), [weight], retain_graph=True)
    (both,) = torch.autograd.grad((outputs[0] + outputs[1]).sum(), [weight])
    torch.testing.assert_close(both, 2 * once)


def test_the_backward_pass_can_be_run_again_and_in_parts() -> None:
    layer = Linear(3, 3).double()
    inputs = torch.randn(2, 3, dtype=torch.float64)
    with loop():
        first = layer(inputs)
        second = layer(first)
    whole = [torch.autograd.grad(second.sum(), [layer.weight], retain_graph=True)[0] for _ in range(2)]
    torch.testing.assert_close(*whole)
    (part,) = torch.autograd.grad(first.sum(), [layer.weight])
    torch.testing.assert_close(part, inputs.sum(0).expand(3, 3))


def test_under_autocast_gradients_are_float32_and_near() -> None:
    layer, inputs = Linear(16, 16), torch.randn(8, 16)

    def gradient() -> Tensor:
        layer.zero_grad()
        state = inputs
        with loop():
            for _ in range(STEPS):
                state = layer(state).tanh()
        state.float().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    exact = gradient()
    with torch.autocast("cpu", torch.bfloat16):
        rough = gradient()
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() < 0.05 * exact.norm()
