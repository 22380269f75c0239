"""Each score against its paper's equation, and what sets it apart."""

import equations
import numpy as np
import pytest
import torch
from combinations import SCORES, configuration
from torch import Tensor

from nmt.attention.attention import Attention
from nmt.attention.build import build_attention
from nmt.attention.memory import Past
from nmt.attention.scores import (
    AdditiveScore,
    ConcatScore,
    CosineScore,
    KeyUpdate,
    LocationAwareScore,
    LocationScore,
    NormedAdditiveScore,
    Score,
)

B, T, S, D, A = 3, 4, 9, 6, 3
KINDS = [kind for kind in SCORES if kind != "gaussian_mixture"]  # whose energies depend on the steps before


def energies(score: Score, query: Tensor, memory: Tensor, before: Tensor | None = None) -> Tensor:
    past = Past.start(torch.ones(memory.shape[:2], dtype=torch.bool))
    if before is not None:
        past = past._replace(weights=before, step=1)
    features, projection = score.key_features(past), score.key_projection()
    update = None if features is None or projection is None else KeyUpdate(features, projection)
    found: Tensor = score(query, score.keys(memory), update).detach()
    return found


def noisy(score: Score) -> Score:
    for parameter in score.parameters():
        torch.nn.init.normal_(parameter)
    return score.double()


@pytest.fixture
def query() -> Tensor:
    return torch.randn(B, T, D).double()


@pytest.fixture
def memory() -> Tensor:
    return torch.randn(B, S, D).double()


@pytest.mark.parametrize(("steps", "length"), [(1, 1), (1, S), (T, 5), (T, S)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_equation(kind: str, steps: int, length: int) -> None:
    config = configuration(f"{kind}-global-softmax")
    attention = build_attention(config, D, D)
    assert isinstance(attention, Attention)
    score = noisy(attention.score)
    query, memory, before = torch.randn(B, steps, D), torch.randn(B, length, D), torch.rand(B, length)
    query, memory, before = query.double(), memory.double(), before.double()
    parameters = {f"score.{name}": value.detach().numpy() for name, value in score.named_parameters()}
    attended = min(length, 7)  # a location score knows no more
    found = energies(score, query, memory, before)[:, :, :attended].numpy()
    expected = [
        [
            [
                equations.energy(
                    config.score, parameters, query[b, t].numpy(), memory[b, s].numpy(), s, before[b].numpy()
                )
                for s in range(attended)
            ]
            for t in range(steps)
        ]
        for b in range(B)
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_concat_of_one_layer_is_additive_and_of_more_is_not(query: Tensor, memory: Tensor) -> None:
    additive = noisy(AdditiveScore(D, D, A))
    for layers in (1, 2):
        concat = ConcatScore(D, D, A, layers).double()
        concat.load_state_dict(additive.state_dict(), strict=False)
        same = torch.equal(energies(concat, query, memory), energies(additive, query, memory))
        assert same == (layers == 1)


def test_the_length_of_a_normed_vector_does_not_matter_its_gain_does(query: Tensor, memory: Tensor) -> None:
    score = noisy(NormedAdditiveScore(D, D, A))
    before = energies(score, query, memory)
    with torch.no_grad():
        score.energy.weight.mul_(3)
        torch.testing.assert_close(energies(score, query, memory), before)
        score.gain.mul_(3)
        torch.testing.assert_close(energies(score, query, memory), before * 3)


def test_a_normed_score_starts_with_gain_one_over_root_of_its_size_and_no_bias() -> None:
    score = NormedAdditiveScore(D, D, 4)
    assert score.gain.item() == 0.5
    assert not score.bias.any()


def test_cosine_sees_directions_alone_and_stays_within_its_sharpness(query: Tensor, memory: Tensor) -> None:
    score = CosineScore(D, D, 10.0).double()
    with torch.no_grad():
        score.strength.weight.zero_()
        score.query_proj.weight.copy_(torch.eye(D))
    found = energies(score, query, memory)
    assert (found.abs() <= 10).all()
    torch.testing.assert_close(energies(score, query * 5, memory * 7), found)
    towards = energies(score, query, query)  # each query to itself
    torch.testing.assert_close(towards.diagonal(dim1=1, dim2=2), torch.full((B, T), 10.0).double(), rtol=1e-6, atol=0)


def test_cosine_of_a_zero_state_is_zero_with_finite_gradients(query: Tensor) -> None:
    score = noisy(CosineScore(D, D, 1.0))
    memory = torch.zeros(B, S, D, dtype=torch.float64, requires_grad=True)
    found = score(query, score.keys(memory))
    assert not found.any()
    (gradient,) = torch.autograd.grad(found.sum(), [memory])
    assert gradient.isfinite().all()


def test_location_does_not_look_at_the_states(query: Tensor, memory: Tensor) -> None:
    score = noisy(LocationScore(D, S))
    assert torch.equal(energies(score, query, memory), energies(score, query, memory * 2 - 1))


@pytest.mark.parametrize("window", ["global", "local_m", "local_p"])
def test_positions_that_a_location_score_does_not_know_are_not_attended_to(window: str, query: Tensor) -> None:
    attention = build_attention(configuration(f"location-{window}-softmax"), D, D).double()
    valid, states = torch.ones(B, 12, dtype=torch.bool), torch.randn(B, 12, D).double()
    long_after = attention.start(valid)._replace(step=10)
    weights = attention.sequence(query, attention.remember(states, valid), long_after).weights
    assert not weights[:, :, 7:].any()
    assert weights[:, :, :7].any(-1).all()


def test_a_location_aware_score_sees_where_the_step_before_attended(query: Tensor, memory: Tensor) -> None:
    """Within half a filter's width, and nowhere else."""
    score = noisy(LocationAwareScore(D, D, A, filters=2, width=3))
    before = torch.zeros(B, S).double()
    nothing = energies(score, query, memory, before)
    before[:, 4] = 1.0
    changed = (energies(score, query, memory, before) != nothing).all(1).all(0)
    assert changed.nonzero().flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    attention = build_attention(configuration(f"{kind}-global-softmax"), D, D)
    assert isinstance(attention, Attention)
    score = noisy(attention.score)
    query = torch.randn(2, 2, D, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, m, *_: score(q, score.keys(m)), (query, memory, *score.parameters()))
