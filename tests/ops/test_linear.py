"""Products with gradients after the loop against autograd, those by oneDNN against torch's, and gates against cells."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.model.recurrent import gru_gates, lstm_gates
from nmt.ops import layers as module
from nmt.ops.layers import Linear, linear, loop, matmul, product, uses_onednn, weight_gradient

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
    with torch.no_grad():
        torch.testing.assert_close(ours(first, *operands), plain(first, *operands))
    for found, expected in zip(
        gradients(ours, first, list(operands)), gradients(plain, first, list(operands)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "part": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
}
SIZES = (5, 128)  # the larger ones are multiplied by oneDNN, on processors where that is faster
by_onednn = pytest.mark.skipif(
    not uses_onednn(torch.empty(3, 128), torch.empty(128, 128)), reason="torch's own product is the fast one here"
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_in_any_layout(layout: str, size: int) -> None:
    for weight_layout, rows, bias in itertools.product(
        LAYOUTS.values(), [(6,), (2, 6), (1,)], [None, torch.randn(130)]
    ):
        inputs, weight = LAYOUTS[layout](torch.randn(*rows, size)[None])[0], weight_layout(torch.randn(130, size))
        torch.testing.assert_close(matmul(inputs, weight, bias), F.linear(inputs, weight, bias), rtol=1e-4, atol=1e-4)
        several, weights = LAYOUTS[layout](torch.randn(2, 6, size)), weight_layout(torch.randn(2, 130, size))
        expected = torch.einsum("dni,doi->dno", several, weights) + (0 if bias is None else bias)
        result = matmul(several, weights, None if bias is None else bias.expand(2, -1))
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_a_weight(layout: str, size: int) -> None:
    for operands in ((), (2,), (9,)):
        inputs, grads = (LAYOUTS[layout](torch.randn(*operands, 6, n)) for n in (size, 130))
        gradient = weight_gradient(inputs, grads)
        torch.testing.assert_close(gradient, torch.einsum("...no,...ni->...oi", grads, inputs), rtol=1e-4, atol=1e-4)


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


@by_onednn
def test_onednn_is_exact_to_float32() -> None:
    inputs, weight = torch.randn(64, 512), torch.randn(512, 512)
    exact = inputs.double() @ weight.double().t()
    ours, torchs = ((product - exact).abs().max() for product in (matmul(inputs, weight), F.linear(inputs, weight)))
    assert ours < 5 * torchs


@by_onednn
def test_onednn_multiplies_large_float32_weights_on_the_cpu_alone() -> None:
    """With any number of rows: all products of a layer come from one library."""
    x, w = torch.randn(3, 128), torch.randn(128, 128)
    for rows in (1, 3, 5000):
        assert uses_onednn(torch.randn(rows, 128), w)
        assert not uses_onednn(torch.randn(rows, 128), torch.randn(127, 128))
        assert uses_onednn(torch.randn(2, rows, 128), torch.randn(2, 128, 128))
        assert not uses_onednn(torch.randn(9, rows, 128), torch.randn(9, 128, 128))
    assert not uses_onednn(x.double(), w.double())
    assert not uses_onednn(x.bfloat16(), w.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not uses_onednn(x, w)


def gates(hidden: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """W x + b and U h + b' (2, count * hidden)."""
    return [torch.randn(2, count * hidden, dtype=dtype, requires_grad=True) for _ in range(2)]


def test_gates_equal_torchs_cells() -> None:
    inputs, hidden, memory = (torch.randn(2, n, dtype=torch.float64) for n in (3, 4, 4))
    gru, lstm = nn.GRUCell(3, 4).double(), nn.LSTMCell(3, 4).double()

    def products(cell: nn.RNNCellBase) -> tuple[Tensor, Tensor]:
        return F.linear(inputs, cell.weight_ih, cell.bias_ih), F.linear(hidden, cell.weight_hh, cell.bias_hh)

    torch.testing.assert_close(gru_gates(*products(gru), hidden), gru(inputs, hidden), rtol=1e-12, atol=1e-12)
    ours, theirs = lstm_gates(*products(lstm), memory), lstm(inputs, (hidden, memory))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradient_of_a_gru() -> None:
    for shape in ((3, 4), (2, 3, 4)):
        gates, recurrent = (torch.randn(*shape[:-1], 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
        hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(gru_gates, (gates, recurrent, hidden))


def test_gradients_of_gates_have_the_types_of_their_tensors() -> None:
    """States stay float32 under autocast."""
    state = torch.randn(2, 4, requires_grad=True)
    gru, lstm = (gates(4, count, torch.bfloat16) for count in (3, 4))
    hidden, cell = lstm_gates(*lstm, state)
    assert (hidden.dtype, cell.dtype) == (torch.float32, torch.float32)
    for loss, operands in ((gru_gates(*gru, state).sum(), gru), (hidden.sum() + cell.sum(), lstm)):
        gradients = torch.autograd.grad(loss, [*operands, state])
        assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]
