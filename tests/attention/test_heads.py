"""Several heads are as many attentions side by side."""

import pytest
import torch
from combinations import Case, attend
from torch import Tensor

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.attention.memory import Attended

HEADS = 2
NAMES = [
    "additive-global-softmax",
    "dot-local_p-entmax15",
    "location_aware-global-sparsemax",
    "general-global-monotonic",
    "general-global-mocha",
    "additive-global-fertility",
    "general-local_m-linear_chain",
]


def heads_alone(attention: MultiHeadAttention, query: Tensor, states: Tensor, valid: Tensor) -> list[Attended]:
    """Each head's own attention, with its rows of the projections."""
    found = []
    for head in range(HEADS):
        size = attention.query_proj.out_features // HEADS
        rows = slice(head * size, (head + 1) * size)
        q, k, v = (
            part @ projection.weight[rows].T
            for part, projection in (
                (query, attention.query_proj),
                (states, attention.key_proj),
                (states, attention.value_proj),
            )
        )
        inner = attention.inner
        assert isinstance(inner, Attention)
        found.append(inner.sequence(q, inner.remember(k, valid, v), inner.start(valid)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_attentions_side_by_side_and_their_weights_the_mean(name: str) -> None:
    attention, query, states, valid = Case(f"{name}-heads", lengths=(9, 3)).make()
    assert isinstance(attention, MultiHeadAttention)
    together, alone = attend(attention, query, states, valid), heads_alone(attention, query, states, valid)
    context = attention.output_proj(torch.cat([head.context for head in alone], dim=-1))
    torch.testing.assert_close(together.context, context)
    torch.testing.assert_close(together.weights, torch.stack([head.weights for head in alone]).mean(0))
    assert not torch.allclose(alone[0].weights, alone[1].weights)


@pytest.mark.parametrize("name", ["location_aware-global-softmax", "additive-global-softmax-coverage"])
def test_each_head_has_its_own_past(name: str) -> None:
    attention, query, states, valid = Case(f"{name}-heads", lengths=(9, 3)).make()
    assert isinstance(attention, MultiHeadAttention)
    together, alone = attend(attention, query, states, valid), heads_alone(attention, query, states, valid)
    assert together.past.weights.shape == (2, HEADS, 9)
    for head in range(HEADS):
        torch.testing.assert_close(together.past.weights[:, head], alone[head].past.weights)
        torch.testing.assert_close(together.past.total[:, head], alone[head].past.total)


def test_one_head_is_query_key_value_attention() -> None:
    """softmax((W_q q) . (W_k h)) W_v h, and an output projection."""
    attention, query, states, valid = Case("dot-global-sparsemax-heads", lengths=(5, 5)).make()
    assert isinstance(attention, MultiHeadAttention)
    attention.heads = 1
    q, k, v = attention.query_proj(query), attention.key_proj(states), attention.value_proj(states)
    expected = attention.inner.normalizer(q @ k.transpose(1, 2), valid[:, None], attention.inner.start(valid)).weights
    attended = attend(attention, query, states, valid)
    torch.testing.assert_close(attended.weights, expected)
    torch.testing.assert_close(attended.context, attention.output_proj(expected @ v))


def test_the_choice_of_all_heads_is_their_joint_choice() -> None:
    """Independent draws: log probabilities and entropies add up. With energies that are all equal both are known."""
    attention, query, states, valid = Case("dot-global-softmax-sampled-heads", training=True).make()
    assert isinstance(attention, MultiHeadAttention)
    with torch.no_grad():
        attention.query_proj.weight.zero_()
    choice = attend(attention, query, states, valid).choice
    assert choice is not None
    nats = HEADS * valid.sum(1, keepdim=True).double().log().expand(-1, query.shape[1])
    torch.testing.assert_close(choice.log_prob, -nats)
    torch.testing.assert_close(choice.entropy, nats)


def test_heads_draw_each_for_itself() -> None:
    attention, query, states, valid = Case(
        "dot-global-softmax-sampled-heads", lengths=(4,), steps=200, training=True
    ).make()
    with torch.no_grad():
        attention.query_proj.weight.zero_()
    weights = attend(attention, query, states, valid).weights
    assert (weights == 0.5).any()  # two heads at different positions
    assert (weights == 1.0).any()
