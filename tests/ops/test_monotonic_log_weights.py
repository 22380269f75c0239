"""Log-weights of monotonic and chunkwise attention: the gradients, and what underflows without logarithms.

Shapes: B batch, S source positions.
"""

import pytest
import torch
from torch import Tensor

from nmt.ops.monotonic import chunk_log_weights, monotonic_log_weights

KEEP = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True, False, True, True, True, False]])


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


def test_a_position_that_nothing_reaches_has_no_weight_and_no_gradient() -> None:
    energies = torch.zeros(1, 4, requires_grad=True)
    previous = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf]])
    log_weights = monotonic_log_weights(energies, torch.ones(1, 4, dtype=torch.bool), previous)
    torch.testing.assert_close(log_weights.exp(), torch.tensor([[0.0, 0.0, 0.5, 0.25]]))
    (gradient,) = torch.autograd.grad(log_weights.exp().sum(), energies)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, 0.125, 0.125]]))


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
