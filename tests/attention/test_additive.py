"""Additive energies: their formula, its gradient, and the memory that autograd keeps."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nmt.attention import scores
from nmt.attention.scores import additive_energies
from nmt.ops.products import defer

B, T, S, A, F = 2, 3, 4, 3, 2


@pytest.fixture(autouse=True, params=["on a CPU", "as on a GPU"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as on a GPU":
        monkeypatch.setattr(scores, "prefers_sigmoid", lambda keys: False)


class Tensors(NamedTuple):
    query: Tensor
    keys: Tensor
    weight: Tensor
    features: Tensor | None = None
    projection: Tensor | None = None


def tensors(updated: bool, dtype: torch.dtype = torch.float64) -> Tensors:
    shapes = [(B, T, A), (B, S, A), (1, A), (B, S, F), (A, F)]
    return Tensors(*(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes[: 5 if updated else 3]))


def formula(given: Tensors) -> Tensor:
    keys = given.keys
    if given.features is not None and given.projection is not None:
        keys = keys + given.features @ given.projection.T
    return torch.tanh(given.query[:, :, None] + keys[:, None]) @ given.weight[0]


def step_by_step(query: Tensor, keys: Tensor, *others: Tensor) -> Tensor:
    (deferred,) = defer(keys)
    return torch.cat([additive_energies(one[:, None], deferred, *others) for one in query.unbind(1)], dim=1)


@pytest.mark.parametrize("energies", [additive_energies, step_by_step])
@pytest.mark.parametrize("updated", [False, True])
def test_is_the_formula_with_its_gradient(updated: bool, energies: Callable[..., Tensor]) -> None:
    given = tensors(updated)
    torch.testing.assert_close(energies(*given), formula(given), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(energies, tuple(given))


@pytest.mark.parametrize("updated", [False, True])
def test_keeps_nothing_of_the_size_of_the_hidden_units(updated: bool) -> None:
    kept: list[int] = []
    given = tensors(updated)

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        additive_energies(*given)
    assert max(kept) == B * S * A


def test_autocast_does_not_round_the_energies() -> None:
    for given in (tensors(False, torch.float32), tensors(True, torch.float32)):
        expected = formula(given)
        with torch.autocast("cpu", torch.bfloat16):
            found = additive_energies(*given)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
