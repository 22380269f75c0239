"""Distributions over source positions: against independent algorithms, their gradients, and what would underflow.

Shapes: B batch, N rows, S source positions.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from torch import Tensor

from nmt.attention.normalizers import (
    chunk_log_weights,
    constrained_sparsemax,
    linear_chain_log_odds,
    monotonic_log_weights,
)

Array = NDArray[np.float64]
KEEP = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True, False, True, True, True, False]])
CHAINS = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True, True, False, True, False, True, True]])


def start() -> Tensor:
    first = torch.full(KEEP.shape, -torch.inf, dtype=torch.float64)
    first[:, 0] = 0.0
    return first


def test_gradient_of_one_step_and_through_two() -> None:
    energies, previous = (torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def weights(energies: Tensor, previous: Tensor) -> Tensor:
        return monotonic_log_weights(energies, KEEP, previous).exp()

    def log_weights(energies: Tensor, previous: Tensor) -> Tensor:
        return monotonic_log_weights(energies, KEEP, previous).masked_fill(~KEEP, 0.0)

    def two_steps(energies: Tensor) -> Tensor:
        return monotonic_log_weights(energies.flip(-1), KEEP, monotonic_log_weights(energies, KEEP, start())).exp()

    assert torch.autograd.gradcheck(weights, (energies, previous))
    assert torch.autograd.gradcheck(log_weights, (energies, previous))
    assert torch.autograd.gradcheck(two_steps, energies)


@pytest.mark.parametrize("energy", [-60.0, 60.0])
def test_nothing_underflows(energy: float) -> None:
    """Every position is nearly always passed, or nearly never: the weight of the last one is far below float32's."""
    energies = torch.full((1, 40), energy, requires_grad=True)
    first = torch.full((1, 40), -torch.inf)
    first[0, 0] = 0.0
    keep = torch.ones(1, 40, dtype=torch.bool)
    log_weights = monotonic_log_weights(energies, keep, first)
    p, q = torch.sigmoid(torch.tensor(energy).double()), torch.sigmoid(torch.tensor(-energy).double())
    expected = p.log() + q.log() * torch.arange(40)
    torch.testing.assert_close(log_weights[0].double(), expected, rtol=1e-5, atol=1e-20)
    (gradient,) = torch.autograd.grad(log_weights[0, -1], energies)
    torch.testing.assert_close(gradient[0, -1], q.float())
    torch.testing.assert_close(gradient[0, :-1], torch.full((39,), -float(p)))


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_gradients_of_chunks(chunk: int) -> None:
    """Also where no chunk reaches, and of a row that has stopped nowhere."""
    energies = torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True)
    stops = torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True)
    nowhere = ~KEEP | (torch.arange(6) < 2) | (torch.arange(3) == 1)[:, None]

    def log_weights(stops: Tensor, energies: Tensor) -> Tensor:
        found = chunk_log_weights(stops.masked_fill(nowhere, -torch.inf), energies, KEEP, chunk)
        return found.masked_fill(found == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(log_weights, (stops, energies))
    assert not log_weights(stops, energies)[1].any()


def drawn(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Unary (N, S) and pairwise (4,) potentials."""
    return torch.randn(CHAINS.shape).double() * scale, torch.randn(4).double() * scale


def over_all_assignments(unary: Array, pairwise: Array) -> Array:
    """(S,), (2, 2) -> p(z_s = 1)."""
    assignments = np.array(list(itertools.product([0, 1], repeat=len(unary))))
    scores = assignments @ unary + pairwise[assignments[:, :-1], assignments[:, 1:]].sum(axis=1)
    odds = np.exp(scores - scores.max())
    marginals: Array = (odds / odds.sum()) @ assignments
    return marginals


@pytest.mark.parametrize("length", range(1, 9))
def test_marginals_are_sums_over_all_assignments_of_what_is_kept(length: int) -> None:
    unary, pairwise = drawn()
    keep = CHAINS[:, :length]
    found = torch.sigmoid(linear_chain_log_odds(unary[:, :length], keep, pairwise)).numpy()
    for n in range(len(keep)):
        kept = keep[n].numpy()
        if kept.any():
            expected = over_all_assignments(unary[n, :length].numpy()[kept], pairwise.view(2, 2).numpy())
            np.testing.assert_allclose(found[n, kept], expected, rtol=0, atol=1e-10)


def test_gradients() -> None:
    unary, pairwise = (part.requires_grad_() for part in drawn())

    def log_odds(unary: Tensor, pairwise: Tensor) -> Tensor:
        return linear_chain_log_odds(unary, CHAINS, pairwise).masked_fill(~CHAINS, 0.0)

    assert torch.autograd.gradcheck(log_odds, (unary, pairwise))


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
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_equals_the_best_of_all_active_sets(energies: Array, bounds: Array) -> None:
    """With ties and exhausted positions, too; the last one has no bound."""
    bounds = np.append(bounds[: len(energies) - 1], np.inf)
    found = constrained_sparsemax(torch.tensor(energies)[None], torch.tensor(bounds)[None])[0]
    np.testing.assert_allclose(found, active_set(energies, bounds), rtol=0, atol=1e-10)


def test_gradients_of_energies_and_bounds() -> None:
    generator = torch.Generator().manual_seed(3)
    energies = torch.randn(40, 6, generator=generator).double().requires_grad_()
    bounds = torch.rand(40, 5, generator=generator).double().mul_(0.5).requires_grad_()

    def weights(energies: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return constrained_sparsemax(energies, torch.cat([bounds, torch.full((40, 1), torch.inf)], dim=1))

    assert torch.autograd.gradcheck(weights, (energies, bounds))


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
