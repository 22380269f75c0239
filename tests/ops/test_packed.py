"""Packed parameters give the same products."""

import pytest
import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.ops import packed
from nmt.ops.packed import pack, pack_int8
from nmt.ops.products import linear

I, O = 96, 200  # noqa: E741
int8 = pytest.mark.skipif(not packed.cpu_capabilities().get("avx2"), reason="no 8-bit products on this CPU")


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


def test_a_processor_without_such_products_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "cpu_capabilities", dict)
    with pytest.raises(UserError, match="precision=int8 needs an x86 CPU"):
        pack_int8(torch.ones(O, I))
