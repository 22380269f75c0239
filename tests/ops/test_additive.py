"""Additive energies: the formula, its gradient, the memory they take."""

import torch
from torch import Tensor

from nmt.ops.additive import additive_energies
from nmt.ops.shared import loop

B, T, S, A = 3, 4, 6, 5


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    query, keys, weight = (torch.randn(shape, dtype=dtype) for shape in ((B, T, A), (B, S, A), (1, A)))
    return query.requires_grad_(), keys.requires_grad_(), weight.requires_grad_()


def step_by_step(query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    with loop():
        return torch.cat([additive_energies(one[:, None], keys, weight) for one in query.unbind(1)], dim=1)


def test_is_the_formula() -> None:
    query, keys, weight = tensors()
    expected = torch.tanh(query[:, :, None] + keys[:, None]) @ weight[0]
    for found in (additive_energies(query, keys, weight), step_by_step(query, keys, weight)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradient_at_once_and_step_by_step() -> None:
    assert torch.autograd.gradcheck(additive_energies, tensors())
    assert torch.autograd.gradcheck(step_by_step, tensors())


def test_gradient_of_the_query_alone() -> None:
    query, keys, weight = tensors()
    assert torch.autograd.gradcheck(lambda query: additive_energies(query, keys.detach(), weight.detach()), query)


def test_keeps_nothing_of_the_size_of_the_hidden_units() -> None:
    kept: list[int] = []
    query, keys, weight = tensors()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        additive_energies(query, keys, weight)
    assert sum(kept) == B * T * A + B * S * A + A


def test_autocast_does_not_round_the_energies() -> None:
    query, keys, weight = tensors(torch.float32)
    expected = torch.tanh(query[:, :, None] + keys[:, None]) @ weight[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = additive_energies(query, keys, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
