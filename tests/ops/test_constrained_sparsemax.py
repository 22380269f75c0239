"""Constrained sparsemax: the distribution nearest to the energies within bounds, and its gradient.

Shapes: N rows, S positions.
"""

import numpy as np
import pytest
import torch
from entmax import sparsemax
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from nmt.ops.constrained_sparsemax import constrained_sparsemax

Array = NDArray[np.float64]


def active_set(energies: Array, bounds: Array) -> Array:
    """(S,), (S,) -> (S,): tries every number of positions at 0 and, of the others, every set that may be at its bound,
    which are those with the greatest e - u."""
    best, found = np.inf, np.zeros(len(energies))
    for top in range(1, len(energies) + 1):
        positive = np.argsort(-energies, kind="stable")[:top]
        for count in range(top + 1):
            full = positive[np.argsort(-(energies - bounds)[positive], kind="stable")[:count]]
            between = np.setdiff1d(positive, full)
            weights = np.zeros(len(energies))
            weights[full] = bounds[full]
            if len(between):
                weights[between] = energies[between] - (energies[between].sum() + weights.sum() - 1) / len(between)
            allowed = (weights >= -1e-12).all() and (weights <= bounds + 1e-12).all()
            if allowed and abs(weights.sum() - 1) < 1e-9:
                distance = ((weights - np.clip(energies, -1e9, 1e9)) ** 2).sum()
                best, found = (distance, weights) if distance < best else (best, found)
    return found


@given(
    energies=npst.arrays(np.float64, st.integers(1, 7), elements=st.floats(-3, 3, width=16)),
    bounds=npst.arrays(np.float64, 7, elements=st.floats(0, 1, width=16)),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_equals_the_best_of_all_active_sets(energies: Array, bounds: Array) -> None:
    """With ties and exhausted positions, too; the last one has no bound."""
    bounds = np.append(bounds[: len(energies) - 1], np.inf)
    found = constrained_sparsemax(torch.tensor(energies)[None], torch.tensor(bounds)[None])[0]
    np.testing.assert_allclose(found, active_set(energies, bounds), rtol=0, atol=1e-10)


def test_without_bounds_it_is_sparsemax() -> None:
    energies = torch.randn(50, 9).double()
    free = torch.full_like(energies, torch.inf)
    torch.testing.assert_close(constrained_sparsemax(energies, free), sparsemax(energies, dim=-1))


def test_gradients_of_energies_and_bounds() -> None:
    generator = torch.Generator().manual_seed(3)
    energies = torch.randn(40, 6, generator=generator).double().requires_grad_()
    bounds = torch.rand(40, 5, generator=generator).double().mul_(0.5).requires_grad_()

    def weights(energies: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return constrained_sparsemax(energies, torch.cat([bounds, torch.full((40, 1), torch.inf)], dim=1))

    assert torch.autograd.gradcheck(weights, (energies, bounds))


def test_a_gradient_reaches_what_lies_between_its_bounds_and_the_bounds_of_what_is_full() -> None:
    """Malaviya et al. 2018, proposition 1."""
    energies = torch.tensor([[2.0, 1.0, 0.9, -5.0]]).double().requires_grad_()
    bounds = torch.tensor([[0.3, torch.inf, torch.inf, torch.inf]]).double().requires_grad_()
    weights = constrained_sparsemax(energies, bounds)
    torch.testing.assert_close(weights.detach(), torch.tensor([[0.3, 0.4, 0.3, 0.0]]).double())
    of_energies, of_bounds = torch.autograd.grad(weights[0, 1], [energies, bounds])
    torch.testing.assert_close(of_energies, torch.tensor([[0.0, 0.5, -0.5, 0.0]]).double())
    torch.testing.assert_close(of_bounds, torch.tensor([[-0.5, 0.0, 0.0, 0.0]]).double())


@pytest.mark.parametrize("energy", [-1e4, 0.0, 1e4])
def test_rows_sum_to_one_in_float32_however_far_apart_the_energies(energy: float) -> None:
    """The last position receives what is left, even if all others are exhausted."""
    energies = torch.randn(64, 20) * 100
    energies[:, -1] = energy
    bounds = torch.rand(64, 20) * (torch.arange(64) % 4)[:, None] / 20
    bounds[:, -1] = torch.inf
    weights = constrained_sparsemax(energies, bounds)
    torch.testing.assert_close(weights.sum(-1), torch.ones(64), rtol=0, atol=2e-6)
    assert (weights <= bounds).all()
    assert torch.equal(weights[::4], torch.eye(20)[-1].expand(16, -1))


def test_rows_without_any_bound_above_zero_are_zero_with_zero_gradients() -> None:
    energies, bounds = torch.randn(2, 4, requires_grad=True), torch.zeros(2, 4, requires_grad=True)
    weights = constrained_sparsemax(energies, bounds)
    assert not weights.any()
    for gradient in torch.autograd.grad(weights.sum(), [energies, bounds]):
        assert not gradient.any()
