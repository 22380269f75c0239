"""The results of an attention and how it is built, as far as the laws of test_combinations do not test them."""

import pytest
import torch
from combinations import CHOSEN, AnyAttention, Case, attend, configuration
from torch import Tensor

from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.config.schema import model as schema
from nmt.model.build import build_attention


def test_hard_attention_tells_its_choices_in_training_alone() -> None:
    for parts in ("", "-coverage", "-heads"):
        case = Case(f"additive-global-softmax-sampled{parts}", training=True)
        attention, query, states, valid = case.make()
        choice = attend(attention, query, states, valid).choice
        assert choice is not None
        assert choice.log_prob.shape == choice.entropy.shape == query.shape[:2]
        assert torch.equal(choice.query, query)
        assert attend(attention.eval(), query, states, valid).choice is None


@pytest.mark.parametrize("name", ["normed_additive-global-monotonic", "general-global-mocha-coverage-heads"])
def test_expected_weights_outside_training_are_those_of_training_without_noise(name: str) -> None:
    case = Case(name, training=True)
    attention, query, states, valid = case.make()
    in_training = attend(attention, query, states, valid)
    values = case.config.model_dump()
    values["normalizer"] |= {"outside_training": "expected", "noise": 1.0}
    config = schema.ScoredAttention.model_validate(values)
    always = build_attention(config, query.shape[-1], states.shape[-1]).double().eval()
    always.load_state_dict(attention.state_dict())
    outside = attend(always, query, states, valid)
    torch.testing.assert_close(outside.weights, in_training.weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outside.context, in_training.context, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(attend(attention.eval(), query, states, valid).weights, in_training.weights)


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


def kept_bytes(attention: AnyAttention, *inputs: Tensor) -> int:
    """Count the bytes that autograd keeps for the backward pass: each storage once, without the parameters."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attended = attend(attention, *inputs)
    assert attended.context.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in attention.parameters()}
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
    """The backward pass must not keep new keys (B, S, A) or a matrix of positions (B, S, S) for each step."""
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
        sizes.append(kept_bytes(attention, query, states, valid))
    scores = 2 if "mocha" in name else 1
    assert sizes[0] < 1.5 * scores * sizes[1]


GUIDED = ["additive-global-softmax", "additive-local_m-softmax", "general-local_p-softmax", "dot-global-monotonic"]


@pytest.mark.parametrize("name", [*GUIDED, *(f"{name}-heads" for name in GUIDED)])
@pytest.mark.parametrize("length", [5, 12])  # windows are masked in short sentences, gathered by position in long ones
def test_log_weights_are_the_logarithm_of_the_weights(name: str, length: int) -> None:
    attention, query, states, valid = Case(name, lengths=(length, 2, 4), training=True).make()
    for module in attention.modules():
        if isinstance(module, SoftmaxNormalizer):
            module.with_log_weights = True
    attended = attend(attention, query, states, valid)
    assert attended.log_weights is not None
    torch.testing.assert_close(attended.log_weights, attended.weights.log())
    assert torch.equal(attended.log_weights == -torch.inf, attended.weights == 0)
