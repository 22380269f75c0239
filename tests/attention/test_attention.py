"""What an attention returns and how it is built, beyond the laws of test_combinations; heads side by side."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from combinations import ALIGNMENTS, CHOSEN, Case, attend, configuration
from torch import Tensor

from nmt.attention.attention import Attended, Attention, MultiHeadAttention
from nmt.config.schema import model as schema
from nmt.model.build import build_attention, build_policy


def test_hard_attention_tells_its_choices_in_training_alone() -> None:
    for parts in ("", "-coverage", "-heads"):
        case = Case(f"additive-global-softmax-sampled{parts}", training=True)
        attention, query, states, valid = case.make()
        choice = attend(attention, query, states, valid).choice
        assert choice is not None
        assert choice.log_prob.shape == choice.entropy.shape == query.shape[:2]
        assert torch.equal(choice.query, query)
        assert attend(attention.eval(), query, states, valid).choice is None


@pytest.mark.parametrize(
    ("part", "values", "name", "expected"),
    [
        ("normalizer", {"kind": "softmax", "temperature": 0.6}, "temperature", 0.6),
        ("normalizer", {"kind": "first_order", "reach": 3, "monotonic": True}, "reach", 3),
        ("normalizer", {"kind": "first_order", "reach": 3, "monotonic": True}, "monotonic", 1),
        ("alignment", {"kind": "straight_through", "temperature": 0.6}, "temperature", 0.6),
        ("alignment", ALIGNMENTS["sampled"] | {"soft_share": 0.3}, "soft_share", 0.3),
        ("normalizer", {"kind": "monotonic", "noise": 0.3, "initial_offset": -2.0}, "noise", 0.3),
        ("normalizer", {"kind": "monotonic", "noise": 0.3, "initial_offset": -2.0}, "offset", -2.0),
        ("normalizer", {"kind": "mocha", "noise": 0.3, "initial_offset": -2.0, "chunk": 5}, "noise", 0.3),
        ("normalizer", {"kind": "mocha", "noise": 0.3, "initial_offset": -2.0, "chunk": 5}, "offset", -2.0),
        ("normalizer", {"kind": "fertility", "fertility": 1.5}, "fertility", 1.5),
        ("window", {"kind": "local_m", "reach": 4}, "reach", 4),
        ("window", {"kind": "local_p", "reach": 4, "dim": 3}, "reach", 4),
        ("score", {"kind": "location", "max_positions": 9}, "max_positions", 9),
        ("score", {"kind": "cosine", "initial_strength": 5.0}, "offset", math.log(math.expm1(5.0))),
    ],
)
def test_parts_are_built_with_the_configured_numbers(
    part: str, values: dict[str, Any], name: str, expected: float
) -> None:
    plain = configuration("dot-global-softmax").model_dump()
    attention = build_attention(schema.ScoredAttention.model_validate(plain | {part: values}), 5, 5)
    assert torch.as_tensor(getattr(getattr(attention, part), name)).item() == pytest.approx(expected)


def test_a_policy_is_built_for_hard_attention_alone() -> None:
    policy = build_policy(configuration("additive-global-softmax-sampled"), 5)
    assert policy is not None
    assert (policy.discount, policy.entropy_weight) == (1.0, 0.0)
    assert build_policy(configuration("additive-global-softmax-straight_through"), 5) is None
    assert build_policy(schema.NoAttention(kind="none", context="first_state"), 5) is None


@pytest.mark.parametrize("name", ["additive-global-softmax", "general-local_p-entmax15-coverage-heads"])
def test_dropout_is_on_the_weights_that_the_context_sees_in_training(name: str) -> None:
    attention, query, states, valid = Case(name, steps=1).make()
    inner = getattr(attention, "inner", attention)
    clean = attend(attention, query, states, valid)
    inner.dropout = 0.5
    assert torch.equal(attend(attention, query, states, valid).context, clean.context)
    attention.train()
    dropped = attend(attention, query, states, valid)
    assert not torch.allclose(dropped.context, clean.context)
    assert torch.equal(dropped.weights, clean.weights)


@pytest.mark.parametrize("name", CHOSEN)
def test_under_autocast_weights_are_float32_and_gradients_finite(name: str) -> None:
    attention, query, states, valid = Case(name, lengths=(9, 2), training=True).make()
    attention, query, states = attention.float(), query.float(), states.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attended = attend(attention, query @ torch.eye(query.shape[-1]), states @ torch.eye(states.shape[-1]), valid)
    assert attended.weights.dtype == attended.past.weights.dtype == torch.float32
    (gradient,) = torch.autograd.grad(attended.context.float().sum(), [states])
    assert gradient.isfinite().all()


def kept_bytes(run: Callable[[], Attended], parameters: Iterable[Tensor]) -> int:
    """What autograd keeps for the backward pass, each storage once, without the parameters."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended = run()
    assert attended.context.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize(
    "name",
    [
        "additive-global-softmax-coverage",
        "general-global-softmax-coverage",
        "location_aware-global-softmax",
        "location_aware-global-softmax-coverage",
        "additive-global-monotonic",
        "additive-global-mocha",
        "additive-global-fertility",
        "gaussian_mixture-global-softmax",
    ],
)
def test_attention_that_reads_its_past_keeps_little_more_memory_than_additive_attention(name: str) -> None:
    """No step keeps keys of its own (B, S, A) or a matrix of positions (B, S, S) for the backward pass."""
    length, dim = 80, 128
    sizes = []
    for each in (name, "additive-global-softmax"):
        values = configuration(each).model_dump()
        if "dim" in values["score"]:
            values["score"]["dim"] = dim
        config = schema.ScoredAttention.model_validate(values)
        attention = build_attention(config, dim, dim).train()
        states, query = (torch.randn(2, length, dim, requires_grad=True) for _ in range(2))
        valid = torch.ones(2, length, dtype=torch.bool)

        def run(made: Any = (attention, query, states, valid)) -> Attended:  # noqa: ANN401
            return attend(*made)

        sizes.append(kept_bytes(run, attention.parameters()))
    scores = 2 if "mocha" in name else 1
    assert sizes[0] < 1.5 * scores * sizes[1]


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
