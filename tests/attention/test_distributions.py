"""Distributions over source positions in cases that test_combinations lacks: ties, edges of gradients, underflow.

Shapes: N rows, S source positions.
"""

import equations
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from torch import Tensor

from nmt.attention.normalizers import chunk_log_weights, constrained_sparsemax, monotonic_log_weights

Array = NDArray[np.float64]
KEEP = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True, False, True, True, True, False]])


def test_gradient_of_a_monotonic_step() -> None:
    energies, previous = (torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def weights(energies: Tensor, previous: Tensor) -> Tensor:
        return monotonic_log_weights(energies, KEEP, previous).exp()

    def log_weights(energies: Tensor, previous: Tensor) -> Tensor:
        return monotonic_log_weights(energies, KEEP, previous).masked_fill(~KEEP, 0.0)

    assert torch.autograd.gradcheck(weights, (energies, previous))
    assert torch.autograd.gradcheck(log_weights, (energies, previous))


@pytest.mark.parametrize("energy", [-60.0, 60.0])
def test_nothing_underflows(energy: float) -> None:
    """Stop probabilities are near 0 or 1: with energy 60, the last weight is about 1e-1016."""
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
    """Tests also positions in no chunk, and a row without any stop."""
    energies = torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True)
    stops = torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True)
    nowhere = ~KEEP | (torch.arange(6) < 2) | (torch.arange(3) == 1)[:, None]

    def log_weights(stops: Tensor, energies: Tensor) -> Tensor:
        found = chunk_log_weights(stops.masked_fill(nowhere, -torch.inf), energies, KEEP, chunk)
        return found.masked_fill(found == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(log_weights, (stops, energies))
    assert not log_weights(stops, energies)[1].any()


def test_a_chunk_longer_than_the_sentence_takes_no_more_memory() -> None:
    stops, energies, keep = torch.randn(2, 9).log_softmax(-1), torch.randn(2, 9), torch.ones(2, 9, dtype=torch.bool)
    whole, longer = (chunk_log_weights(stops, energies, keep, chunk) for chunk in (9, 10**12))
    assert torch.equal(whole, longer)


@given(
    energies=npst.arrays(np.float64, st.integers(1, 7), elements=st.floats(-3, 3, width=16)),
    bounds=npst.arrays(np.float64, 7, elements=st.floats(0, 1, width=16)),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_constrained_sparsemax_equals_its_equation(energies: Array, bounds: Array) -> None:
    """Tests also ties and exhausted positions. The last position has no bound."""
    bounds = np.append(bounds[: len(energies) - 1], np.inf)
    found = constrained_sparsemax(torch.tensor(energies)[None], torch.tensor(bounds)[None])[0]
    np.testing.assert_allclose(found, equations.constrained(energies, bounds), rtol=0, atol=1e-10)


@pytest.mark.parametrize("energy", [-1e4, 0.0, 1e4])
def test_rows_sum_to_one_in_float32_however_far_apart_the_energies(energy: float) -> None:
    """The last position receives the remaining weight, even if all other positions are exhausted."""
    energies = torch.randn(64, 20) * 100
    energies[:, -1] = energy
    bounds = torch.rand(64, 20) * (torch.arange(64) % 4)[:, None] / 20
    bounds[:, -1] = torch.inf
    weights = constrained_sparsemax(energies, bounds)
    torch.testing.assert_close(weights.sum(-1), torch.ones(64), rtol=0, atol=2e-6)
    assert (weights <= bounds).all()
    assert torch.equal(weights[::4], torch.eye(20)[-1].expand(16, -1))


@pytest.mark.parametrize("spread", [1e5, 1e7])
def test_rows_sum_to_one_if_the_greatest_energies_are_used_up(spread: float) -> None:
    energies, bounds = -torch.rand(32, 60) * spread, torch.rand(32, 60) / 20
    bounds[:, -1] = torch.inf
    weights = constrained_sparsemax(energies, bounds)
    torch.testing.assert_close(weights.sum(-1), torch.ones(32), rtol=0, atol=1e-4)
    assert (weights <= bounds).all()
