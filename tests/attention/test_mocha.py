"""Monotonic chunkwise attention: the expected weights are those of the hard process, step after step.

Shapes: B batch, S source positions, T target positions.
"""

import equations
import numpy as np
import pytest
import torch
from combinations import Case, attend, configuration
from test_monotonic import B, S, T, all_steps, plain
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.normalizers import Chunk
from nmt.attention.scores import DotScore
from nmt.config.schema import model as schema


def chunked(stops: Tensor, energies: Tensor, size: int) -> Tensor:
    """(B, T, S) probabilities to stop, (B, T, S) -> weights (B, T, S)."""
    keep = torch.ones(len(stops), 1, stops.shape[-1], dtype=torch.bool)
    weights: Tensor = Chunk(DotScore(), size)(stops.log(), energies, keep).weights
    return weights


@pytest.mark.parametrize("size", [1, 2, S, 10])
def test_expected_weights_are_the_mean_of_the_softmaxes_over_the_chunks(size: int) -> None:
    stops, energies = all_steps(plain(0.3).train(), torch.randn(B, T, S).double()), torch.randn(B, T, S).double()
    found = chunked(stops, energies, size)
    ends = torch.eye(S).double().expand(B, S, S)
    by_end = torch.stack([chunked(ends, u[:, None].expand(-1, S, -1), size) for u in energies.unbind(1)], dim=1)
    torch.testing.assert_close(found, torch.einsum("bte,btes->bts", stops, by_end))
    for b in range(B):
        for end in range(S):
            first = max(0, end - size + 1)
            inside = energies[b, 0, first : end + 1].softmax(-1)
            torch.testing.assert_close(by_end[b, 0, end, first : end + 1], inside)
            assert by_end[b, 0, end].sum().item() == pytest.approx(1.0)


def test_a_chunk_of_one_position_is_monotonic_attention() -> None:
    mocha, *inputs = Case("general-global-mocha").make()
    mocha.chunk.size = 1
    monotonic, *_ = Case("general-global-monotonic").make()
    monotonic.load_state_dict(mocha.state_dict(), strict=False)
    for training in (False, True):
        expected = attend(monotonic.train(training), *inputs)
        torch.testing.assert_close(attend(mocha.train(training), *inputs).weights, expected.weights)
    config = configuration("general-global-mocha").model_dump()
    config["normalizer"]["chunk"] = 1
    with pytest.raises(ValueError, match="chunk=1 needs 2 positions or more"):
        schema.ScoredAttention.model_validate(config)


def test_reading_goes_on_from_where_the_chunk_ended_whatever_the_weights_in_it() -> None:
    """At test: stops at positions 1, 1, 3, then passes the end. All weight is on the first position of a chunk."""
    attention, query, states, valid = Case("dot-global-mocha", lengths=(4,), steps=5, memory_dim=5).make()
    states[0] = torch.eye(5, dtype=torch.float64)[:4]
    signs = torch.tensor([[-1, 1, 1, 1], [1, 1, -1, -1], [1, -1, -1, 1], [1, 1, 1, -1], [1, 1, 1, 1]]).double()
    query[0, :, :4], query[0, :, 4] = signs, 0.0
    torch.nn.init.zeros_(attention.normalizer.offset)
    attention.chunk.size = 2
    attention.chunk.score.forward = lambda query, keys, update: -1000.0 * torch.arange(4.0).double().expand(1, 1, -1)
    weights = attend(attention.eval(), query, states, valid).weights[0]
    assert weights.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_the_second_score_has_parameters_of_its_own_and_coverage_is_not_added_to_it() -> None:
    attention, *inputs = Case("additive-global-mocha-coverage", training=True).make()
    before = attend(attention, *inputs)
    with torch.no_grad():
        for parameter in attention.chunk.score.parameters():
            parameter.mul_(2)
    after = attend(attention, *inputs)
    assert not torch.allclose(before.weights, after.weights)
    torch.testing.assert_close(before.weights[:, 0].sum(-1), after.weights[:, 0].sum(-1))


def test_log_weights_are_those_of_the_weights_and_nothing_underflows() -> None:
    energies = torch.full((1, 1, 40), -60.0, requires_grad=True)
    within = (torch.randn(1, 1, 40) * 1e3).requires_grad_()
    keep = torch.ones(1, 1, 40, dtype=torch.bool)
    stops = plain().float().train()(energies, keep, Past.start(keep[0])).log_weights
    log_weights = Chunk(DotScore(), 3)(stops, within, keep).log_weights
    assert log_weights.isfinite().all()
    found = equations.chunked(np.ones(40), within[0, 0].detach().double().numpy(), 3)
    np.testing.assert_allclose(log_weights[0, 0].detach().exp() * np.exp(60), found, rtol=1e-2, atol=1e-6)
    for gradient in torch.autograd.grad(log_weights.sum(), [energies, within]):
        assert gradient.isfinite().all()
