"""Products whose gradients are computed after the loop equal autograd's; products by oneDNN, with packed weights and in
8-bit integers equal torch's; gates."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.model.recurrent import gru_gates, lstm_gates
from nmt.ops import products as module
from nmt.ops.products import Linear, defer, deferring, gather_rows, linear, matmul, pack, pack_int8, product

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
    """Return loss and gradients of a recurrence over STEPS steps, with respect to all its inputs."""
    state, outputs, deferred = first, [], defer(*operands)
    for _ in range(STEPS):
        outputs.append(operation(state, *deferred))
        state = torch.tanh(state + outputs[-1].mean(-1, keepdim=True))
    loss = torch.stack(outputs).sin().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [first, *operands])]


@pytest.mark.parametrize("most", [10**6, 100, 1])
@pytest.mark.parametrize("name", CASES)
def test_equals_autograd(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`most` limits how many numbers wait until a parameter's gradient is computed from them."""
    monkeypatch.setattr(module, "PENDING_ELEMENTS", most)
    ours, plain, shapes = CASES[name]
    first, *operands = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    with torch.no_grad():
        torch.testing.assert_close(ours(first, *operands), plain(first, *operands))
    for found, expected in zip(
        gradients(ours, first, list(operands)), gradients(plain, first, list(operands)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_loop_ends_where_it_is_left() -> None:
    """A second loop over the same parameter computes its own gradient; a loop inside another belongs to it."""
    layer = Linear(3, 3).double()
    inputs = torch.randn(2, 3, dtype=torch.float64)
    outputs = []
    for _ in range(2):
        with deferring(layer), deferring(layer, None):
            outputs.append(layer(inputs))
    assert layer.operands is None
    (once,) = torch.autograd.grad(outputs[0].sum(), [layer.weight], retain_graph=True)
    (both,) = torch.autograd.grad((outputs[0] + outputs[1]).sum(), [layer.weight])
    torch.testing.assert_close(both, 2 * once)


def test_other_uses_of_a_deferred_tensor_have_their_gradients_too() -> None:
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    inputs, other = torch.randn(2, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def loss(weight: Tensor) -> Tensor:
        return linear(inputs, weight).sin().sum() + linear(2 * inputs, weight).sum() + (weight * other).sum()

    (deferred,) = defer(weight)
    gradients = [torch.autograd.grad(loss(each), [weight])[0] for each in (weight, deferred)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_backward_pass_can_be_run_again_and_in_parts() -> None:
    layer = Linear(3, 3).double()
    inputs = torch.randn(2, 3, dtype=torch.float64)
    with deferring(layer):
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
        with deferring(layer):
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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "part": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
}
SIZES = (5, 128)  # oneDNN multiplies the larger ones where it is faster


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_in_any_layout(layout: str, size: int) -> None:
    for weight_layout, shape, bias in itertools.product(
        LAYOUTS.values(), [(6,), (2, 6), (1,)], [None, torch.randn(130)]
    ):
        inputs, weight = LAYOUTS[layout](torch.randn(*shape, size)[None])[0], weight_layout(torch.randn(130, size))
        torch.testing.assert_close(matmul(inputs, weight, bias), F.linear(inputs, weight, bias), rtol=1e-4, atol=1e-4)
        several, weights = LAYOUTS[layout](torch.randn(2, 6, size)), weight_layout(torch.randn(2, 130, size))
        expected = torch.einsum("dni,doi->dno", several, weights) + (0 if bias is None else bias)
        result = matmul(several, weights, None if bias is None else bias.expand(2, -1))
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_has_its_gradients(size: int) -> None:
    layer, plain = Linear(size, 130), nn.Linear(size, 130)
    plain.load_state_dict(layer.state_dict())
    inputs = torch.randn(2, 6, size, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(module(inputs).sin().sum(), [inputs, *module.parameters()]) for module in (layer, plain)
    )
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_gates_have_the_types_of_their_tensors() -> None:
    """Gates may be bfloat16 while the state stays float32, as under autocast."""
    state = torch.randn(2, 4, requires_grad=True)
    gru, lstm = ([torch.randn(2, 4 * n).bfloat16().requires_grad_() for _ in range(2)] for n in (3, 4))
    hidden, cell = lstm_gates(*lstm, state)
    assert (hidden.dtype, cell.dtype) == (torch.float32, torch.float32)
    for loss, operands in ((gru_gates(*gru, state).sum(), gru), (hidden.sum() + cell.sum(), lstm)):
        gradients = torch.autograd.grad(loss, [*operands, state])
        assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]


def read_twice(tensor: Tensor, shared: bool) -> list[Tensor]:
    indices = [torch.tensor([0, 5, 5, 2]), torch.tensor([5, 1])]
    if not shared:
        return [tensor.flatten(0, 1)[index] for index in indices]
    (deferred,) = defer(tensor)
    return [gather_rows(deferred, index) for index in indices]


@pytest.mark.parametrize("used", [[0, 1], [0], [1]])
def test_reading_is_indexing(used: list[int]) -> None:
    """Tests all choices of reads that the loss uses, and a second backward pass."""
    tensor = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for shared in (True, False):
        reads = read_twice(tensor * 2, shared)
        loss = sum((reads[i].square().sum() for i in used), start=torch.zeros(()).double())
        for again in (True, False):
            gradients.append(torch.autograd.grad(loss, [tensor], retain_graph=again)[0])
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-12)
    for found, expected in zip(read_twice(tensor, True), read_twice(tensor, False), strict=True):
        assert torch.equal(found, expected)


I, O = 96, 200  # noqa: E741
int8 = pytest.mark.skipif(not module.cpu_capabilities().get("avx2"), reason="no 8-bit products on this CPU")


def operands(rows: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    shapes = ((*rows, I), (O, I), (O,))
    inputs, weight, bias = (torch.randn(shape, generator=made).to(dtype) for shape in shapes)
    return inputs.tanh(), weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1,), (5,), (3, 40)])
def test_is_the_product(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, weight, bias = operands(rows, dtype)
    for offset in (bias, None):
        expected = torch.nn.functional.linear(inputs, weight, offset)
        result = linear(inputs, pack(weight), offset)
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@int8
@pytest.mark.parametrize("bounded", [False, True])
def test_integers_are_nearly_the_product(bounded: bool) -> None:
    inputs, weight, bias = operands((3, 40))
    inputs = inputs if bounded else inputs * torch.logspace(-3, 3, 40)[:, None]  # rows of very different scale
    for offset in (bias, None):
        expected = torch.nn.functional.linear(inputs, weight, offset)
        result = linear(inputs, pack_int8(weight, bounded), offset)
        assert result.shape == expected.shape
        error = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < 0.02
    zeros = linear(torch.zeros(2, I), pack_int8(weight, bounded), bias)
    torch.testing.assert_close(zeros, bias.expand(2, -1))


@int8
@pytest.mark.parametrize("bounded", [False, True])
def test_a_row_of_integers_does_not_depend_on_the_others(bounded: bool) -> None:
    inputs, weight, bias = operands((64,))
    weight = pack_int8(weight, bounded)
    together = linear(inputs, weight, bias)
    for row in (0, 7, 63):
        alone = linear(inputs[row : row + 1], weight, bias)[0]
        torch.testing.assert_close(alone, together[row], rtol=1e-5, atol=1e-5)  # far below the integers' step of 1e-2
