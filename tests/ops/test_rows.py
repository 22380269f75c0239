"""Rows gathered repeatedly; rows swapped."""

import pytest
import torch
from torch import Tensor

from nmt.model.recurrent import swap_rows
from nmt.ops.products import defer, rows


def read_twice(tensor: Tensor, shared: bool) -> list[Tensor]:
    indices = [torch.tensor([0, 5, 5, 2]), torch.tensor([5, 1])]
    if not shared:
        return [tensor.flatten(0, 1)[index] for index in indices]
    (deferred,) = defer(tensor)
    return [rows(deferred, index) for index in indices]


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


def test_swapped_rows_take_their_gradients_back() -> None:
    index = torch.tensor([2, 1, 0, 3])
    tensor = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(swap_rows(tensor, index), tensor[index])
    assert torch.autograd.gradcheck(swap_rows, (tensor, index))
