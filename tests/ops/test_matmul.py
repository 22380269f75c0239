"""The product that is fast on the processor at hand is the product."""

import pytest
import torch
from torch.nn import functional as F

from nmt.ops import matmul as module
from nmt.ops.linear import Linear
from nmt.ops.matmul import matmul, uses_onednn, weight_gradient


@pytest.fixture(params=[0, module.MIN_WEIGHT], ids=["onednn", "torch"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By oneDNN also where weights are as small as here, if it is for this processor, and by torch's own products."""
    monkeypatch.setattr(module, "MIN_WEIGHT", request.param)


either = pytest.mark.usefixtures("_either")
own = pytest.mark.skipif(module._onednn is None, reason="torch's own product is the fast one here")
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "part": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, dim=-2)[..., ::2, :],
}


@either
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5), (1, 5)])
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_product(layout: str, weight_layout: str, shape: tuple[int, ...], with_bias: bool) -> None:
    inputs, weight = LAYOUTS[layout](torch.randn(shape)), LAYOUTS[weight_layout](torch.randn(7, 5))
    bias = torch.randn(7) if with_bias else None
    torch.testing.assert_close(matmul(inputs, weight, bias), F.linear(inputs, weight, bias))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_onednn_gets_whole_matrices(layout: str) -> None:
    """Parts of wider ones take it a thousand times as long."""
    matrix = LAYOUTS[layout](torch.randn(6, 5))
    dense = module._dense(matrix)
    assert dense.is_contiguous() or dense.mT.is_contiguous()
    assert torch.equal(dense, matrix)
    assert (dense is matrix) == (layout in {"dense", "transposed"})


@either
@pytest.mark.parametrize("with_bias", [True, False])
def test_several_products(with_bias: bool) -> None:
    inputs, weight = torch.randn(2, 6, 5), torch.randn(2, 7, 5)
    bias = torch.randn(2, 7) if with_bias else None
    expected = torch.einsum("dni,doi->dno", inputs, weight) + (0 if bias is None else bias[:, None])
    torch.testing.assert_close(matmul(inputs, weight, bias), expected)


@either
@pytest.mark.parametrize("shape", [(), (2,), (9,)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_a_weight(layout: str, shape: tuple[int, ...]) -> None:
    inputs, grads = LAYOUTS[layout](torch.randn(*shape, 6, 5)), LAYOUTS[layout](torch.randn(*shape, 6, 7))
    found = weight_gradient(inputs, grads)
    assert found.is_contiguous() or shape == (9,)
    torch.testing.assert_close(found, torch.einsum("...no,...ni->...oi", grads, inputs))


@own
def test_is_exact_to_float32() -> None:
    """No reduced precision within."""
    inputs, weight = torch.randn(64, 512), torch.randn(512, 512)
    exact = inputs.double() @ weight.double().t()
    errors = [(found - exact).abs().max() for found in (matmul(inputs, weight), F.linear(inputs, weight))]
    assert errors[0] < 5 * errors[1]


@own
def test_only_float32_on_the_cpu_is_taken_over() -> None:
    x, w = torch.randn(3, 128), torch.randn(128, 128)
    assert uses_onednn(x, w)
    assert not uses_onednn(x.double(), w.double())
    assert not uses_onednn(x.bfloat16(), w.bfloat16())
    assert not uses_onednn(torch.randn(9, 3, 128), torch.randn(9, 128, 128))
    with torch.autocast("cpu", torch.bfloat16):
        assert not uses_onednn(x, w)


@own
def test_only_weights_that_are_worth_it_are_taken_over() -> None:
    """Whatever the number of rows: a layer's products are always of one library."""
    for rows in (1, 3, 5000):
        x = torch.randn(rows, 128)
        assert uses_onednn(x, torch.randn(128, 128))
        assert not uses_onednn(x, torch.randn(127, 128))
        assert uses_onednn(torch.randn(2, rows, 128), torch.randn(2, 128, 128))
        assert not uses_onednn(torch.randn(2, rows, 128), torch.randn(2, 127, 128))


@either
def test_a_layer_has_its_gradients() -> None:
    layer, plain = Linear(5, 7), torch.nn.Linear(5, 7)
    plain.load_state_dict(layer.state_dict())
    inputs = torch.randn(2, 6, 5, requires_grad=True)
    found, expected = (
        torch.autograd.grad(each(inputs).sin().sum(), [inputs, *each.parameters()]) for each in (layer, plain)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
