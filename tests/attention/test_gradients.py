"""Gradients of whole attentions against differences, in float64."""

import pytest
import torch
from combinations import CHOSEN, DRAWING, Case
from torch import Tensor

DIFFERENTIABLE = [name for name in CHOSEN if not DRAWING & set(name.split("-"))]
# S = 9: a window of one position on either side is read alone; 5: masked, which without a window is nothing new
LONG, SHORT = (9, 2), (5, 3)
SIZES = [(name, lengths) for name in DIFFERENTIABLE for lengths in (LONG, SHORT)]


def check(case: Case, fast: bool) -> None:
    """Of context and weights; monotonic as in training."""
    training = case.config.normalizer.kind in {"monotonic", "mocha"}
    attention, query, states, valid = case._replace(training=training).make()

    def attend(query: Tensor, states: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        attended = attention.sequence(query, attention.remember(states, valid), attention.start(valid))
        return attended.context, attended.weights

    inputs = (query.requires_grad_(), states.requires_grad_(), *attention.parameters())
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=fast)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        pytest.param(name, lengths, marks=[pytest.mark.slow] if lengths is SHORT and "-global-" in name else [])
        for name, lengths in SIZES
    ],
)
def test_gradients_in_directions_drawn_at_random(name: str, lengths: tuple[int, ...]) -> None:
    check(Case(name, lengths), fast=True)


@pytest.mark.parametrize("name", ["location_aware-local_p-entmax15-heads", "cosine-local_m-sparsemax"])
def test_every_single_gradient(name: str) -> None:
    check(Case(name, lengths=(8, 3), steps=2, query_dim=2, memory_dim=2), fast=False)


@pytest.mark.parametrize("name", [name for name in CHOSEN if name not in DIFFERENTIABLE])
def test_a_hard_choice_at_test_is_differentiable_through_the_values_alone(name: str) -> None:
    attention, query, states, valid = Case(name, lengths=(9, 2)).make()

    def attend(states: Tensor) -> Tensor:
        context: Tensor = attention.sequence(query, attention.remember(states, valid), attention.start(valid)).context
        return context

    assert torch.autograd.gradcheck(attend, (states.requires_grad_(),), fast_mode=True)
