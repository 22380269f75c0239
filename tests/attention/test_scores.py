"""Each score against an independent float64 NumPy version written from the paper's equation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from nmt.attention.scores import AdditiveScore, DotScore, GeneralScore

B, T, S, D, A = 3, 4, 5, 6, 7
Array = NDArray[np.float64]


def dot(q: Array, h: Array, _: dict[str, Array]) -> float:
    return float(sum(q[i] * h[i] for i in range(len(q))))


def general(q: Array, h: Array, p: dict[str, Array]) -> float:
    return float(q @ p["key_proj.weight"] @ h)


def additive(q: Array, h: Array, p: dict[str, Array]) -> float:
    hidden = np.tanh(p["query_proj.weight"] @ q + p["key_proj.weight"] @ h)
    return float(p["energy.weight"][0] @ hidden)


CASES = [(DotScore(), dot), (GeneralScore(D, D), general), (AdditiveScore(D, D, A), additive)]
Equation = Callable[[Array, Array, dict[str, Array]], float]


@pytest.mark.parametrize(("score", "equation"), CASES)
@pytest.mark.parametrize("steps", [1, T])
def test_equals_the_equation(score: nn.Module, equation: Equation, steps: int) -> None:
    score = score.double()
    query, memory = torch.randn(B, steps, D).double(), torch.randn(B, S, D).double()
    with torch.no_grad():
        energies = score(query, score.keys(memory))
    parameters = {name: value.detach().numpy() for name, value in score.named_parameters()}
    expected = [
        [[equation(query[b, t].numpy(), memory[b, s].numpy(), parameters) for s in range(S)] for t in range(steps)]
        for b in range(B)
    ]
    np.testing.assert_allclose(energies.numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("score", [case[0] for case in CASES])
def test_gradients(score: nn.Module) -> None:
    score = score.double()
    query = torch.randn(2, 2, D, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, m, *_: score(q, score.keys(m)), (query, memory, *score.parameters()))
