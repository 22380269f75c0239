"""Laws that every composed attention keeps."""

from typing import Any

import pytest
import torch

from nmt.attention.attention import Attention
from nmt.attention.build import build_attention
from nmt.attention.memory import Past
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.config import schema

B, T, S, D = 4, 3, 6, 8
SCORES: list[dict[str, Any]] = [{"kind": "dot"}, {"kind": "general"}, {"kind": "additive", "dim": 5}]
LENGTHS = torch.tensor([6, 3, 1, 4])
VALID = torch.arange(S) < LENGTHS[:, None]


def build(score: dict[str, Any], temperature: float = 1.0) -> Attention:
    config = schema.SoftAttention.model_validate(
        {
            "kind": "attention",
            "score": score,
            "window": {"kind": "global"},
            "normalizer": {"kind": "softmax", "temperature": temperature},
        }
    )
    return build_attention(config, D, D).double()


@pytest.fixture(params=SCORES, ids=lambda score: score["kind"])
def attention(request: pytest.FixtureRequest) -> Attention:
    return build(request.param)


def attend(attention: Attention, query: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    context, weights = attention(query, attention.remember(states, VALID), Past.start(VALID))
    return context, weights


@pytest.fixture
def query() -> torch.Tensor:
    return torch.randn(B, T, D).double()


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(B, S, D).double()


def test_padding_gets_exactly_nothing_and_rows_sum_to_one(
    attention: Attention, query: torch.Tensor, states: torch.Tensor
) -> None:
    _, weights = attend(attention, query, states)
    assert (weights[~VALID[:, None].expand(B, T, S)] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, T).double())


def test_garbage_in_padding_changes_nothing(attention: Attention, query: torch.Tensor, states: torch.Tensor) -> None:
    clean = attend(attention, query, states)
    dirty = attend(attention, query, torch.where(VALID[:, :, None], states, 1e4))
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before, after)


def test_steps_one_by_one_equal_one_call(attention: Attention, query: torch.Tensor, states: torch.Tensor) -> None:
    together = attend(attention, query, states)
    for t in range(T):
        alone = attend(attention, query[:, t : t + 1], states)
        for one, all_steps in zip(alone, together, strict=True):
            torch.testing.assert_close(one[:, 0], all_steps[:, t], rtol=1e-12, atol=1e-12)


def test_order_of_the_batch_changes_nothing(attention: Attention, query: torch.Tensor, states: torch.Tensor) -> None:
    order = torch.tensor([2, 0, 3, 1])
    memory, past = attention.remember(states, VALID), Past.start(VALID)
    context, weights = attention(query, memory, past)
    shuffled = attention(query[order], memory.select(order), past.select(order))
    torch.testing.assert_close(shuffled[0], context[order])
    torch.testing.assert_close(shuffled[1], weights[order])


def test_context_is_the_weighted_sum_of_states(attention: Attention, query: torch.Tensor, states: torch.Tensor) -> None:
    context, weights = attend(attention, query, states)
    torch.testing.assert_close(context, torch.einsum("bts,bsm->btm", weights, states))


def test_a_row_without_any_position_is_zero_with_finite_gradients(attention: Attention) -> None:
    states = torch.randn(1, S, D, dtype=torch.float64, requires_grad=True)
    query = torch.randn(1, 1, D, dtype=torch.float64, requires_grad=True)
    nowhere = torch.zeros(1, S, dtype=torch.bool)
    context, weights = attention(query, attention.remember(states, nowhere), Past.start(nowhere))
    context.sum().backward()
    assert not weights.any()
    assert not context.any()
    assert states.grad is not None
    assert query.grad is not None
    assert states.grad.isfinite().all()
    assert query.grad.isfinite().all()


def test_temperature_sharpens_and_flattens() -> None:
    energies = torch.tensor([[[1.0, 2.0, 3.0]]])
    keep = torch.ones(1, 1, 3, dtype=torch.bool)
    past = Past.start(keep[:, 0])
    cold, plain, hot = (SoftmaxNormalizer(t)(energies, keep, past).max() for t in (0.1, 1.0, 10.0))
    assert cold > plain > hot
    torch.testing.assert_close(SoftmaxNormalizer(0.5)(energies, keep, past), torch.softmax(energies * 2, -1))


def test_softmax_stays_in_float32_for_reduced_energies() -> None:
    keep = torch.ones(1, 1, 3, dtype=torch.bool)
    weights = SoftmaxNormalizer()(torch.randn(1, 1, 3).bfloat16(), keep, Past.start(keep[:, 0]))
    assert weights.dtype == torch.float32


def test_the_past_adds_up_and_selects() -> None:
    past = Past.start(VALID)
    first, second = torch.rand(B, S), torch.rand(B, S)
    past = past.after(first).after(second)
    assert past.step == 2
    assert torch.equal(past.weights, second)
    torch.testing.assert_close(past.total, first + second)
    chosen = past.select(torch.tensor([3, 3]))
    assert torch.equal(chosen.weights, second[[3, 3]])
    assert torch.equal(chosen.total, (first + second)[[3, 3]])
