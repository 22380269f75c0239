"""Fertilities: no word receives more than its budget, and </s> takes what is left."""

import pytest
import torch
from combinations import Case, attend
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.normalizers import FertilityNormalizer

KEEP = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
LAST = [4, 2]


def all_steps(fertility: float, energies: Tensor) -> Tensor:
    """(B, T, S) -> weights (B, T, S), each step's past being the steps before it."""
    normalizer, past, rows = FertilityNormalizer(fertility), Past.start(KEEP), []
    for step in energies.unbind(1):
        rows.append(normalizer(step[:, None], KEEP[:, None], past).weights)
        past = past.after(rows[-1], None)
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("fertility", [0.3, 1.0, 2.5])
def test_no_word_exceeds_its_budget_and_the_last_position_has_none(fertility: float) -> None:
    energies = torch.randn(2, 30, 5).double()
    weights = all_steps(fertility, energies)
    totals = weights.sum(1)
    for b, last in enumerate(LAST):
        assert (totals[b, :last] <= fertility + 1e-12).all()
        assert totals[b, last] > 30 - last * fertility - 1e-9
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 30).double(), rtol=0, atol=1e-12)


def test_once_all_budgets_are_used_up_the_last_position_has_all_weight_and_gradients_are_finite() -> None:
    energies = torch.randn(2, 20, 5).double()
    for b, last in enumerate(LAST):
        energies[b, :, last] -= 100.0
    energies.requires_grad_()
    weights = all_steps(1.0, energies)
    for b, last in enumerate(LAST):
        assert torch.equal(weights[b, last:], torch.eye(5).double()[last].expand(20 - last, -1))
    (gradient,) = torch.autograd.grad(weights.square().sum(), [energies])
    assert gradient.isfinite().all()


def test_without_reaching_a_budget_it_is_sparsemax() -> None:
    made = Case("general-global-fertility", steps=2).make()
    attention, *inputs = made
    attention.normalizer.fertility = 3.0
    plain, *_ = Case("general-global-sparsemax").make()
    plain.load_state_dict(attention.state_dict())
    torch.testing.assert_close(attend(attention, *inputs).weights, attend(plain, *inputs).weights)


def test_earlier_steps_are_learned_through_the_budget() -> None:
    energies = torch.tensor([[[2.0, 1.5, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0, 0.0]]]).double().requires_grad_()
    normalizer, past = FertilityNormalizer(1.0), Past.start(KEEP[:1])
    first = normalizer(energies[:, :1], KEEP[:1, None], past).weights
    second = normalizer(energies[:, 1:], KEEP[:1, None], past.after(first, None)).weights
    torch.testing.assert_close(second[0, 0, 0], 1 - first[0, 0, 0])
    (gradient,) = torch.autograd.grad(second[0, 0, 0], [energies])
    torch.testing.assert_close(gradient[0, 0, :2], torch.tensor([-0.5, 0.5]).double())
