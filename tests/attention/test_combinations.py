"""The laws and the papers' equations for every combination of components that the configuration accepts."""

import itertools

import equations
import numpy as np
import pytest
import torch
from combinations import (
    ALIGNMENTS,
    CHOSEN,
    COMBINATIONS,
    COVERAGES,
    DRAWING,
    EVERY,
    NORMALIZERS,
    PROJECTIONS,
    SCORES,
    WINDOWS,
    Case,
    Made,
    attend,
    configuration,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import LAWS, Law
from torch import Tensor

DIFFERS_IN_TRAINING = {"sampled", "straight_through", "monotonic", "mocha"}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        draw(st.sampled_from(COMBINATIONS)),
        lengths=tuple(draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))),
        padding=draw(st.integers(0, 2)),
        steps=draw(st.integers(1, 5)),
        training=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        reach=draw(st.integers(1, 3)),
        query_dim=draw(st.integers(1, 6)),
        memory_dim=draw(st.integers(1, 6)),
    )


def equals_the_papers(case: Case, made: Made) -> None:
    """Compares sentence by sentence with `equations`. Alignments that draw are tested in test_alignment."""
    if case.draws:
        return
    attention, query, states, valid = made
    attended = attend(attention, query, states, valid)
    parameters = {name: value.detach().numpy() for name, value in attention.named_parameters()}
    for b, length in enumerate(case.lengths):
        sentence = states[b, :length].numpy()
        context, weights = equations.attention(case.config, parameters, query[b].numpy(), sentence, case.training)
        np.testing.assert_allclose(attended.context[b].detach().numpy(), context, rtol=0, atol=1e-10)
        np.testing.assert_allclose(attended.weights[b, :, :length].detach().numpy(), weights, rtol=0, atol=1e-10)


def test_the_configuration_accepts_what_is_swept() -> None:
    """Every score goes with every window and normalizer, and every alignment with every normalizer, except:

    Normalizers that read the previous weights accept only a global window. The Gaussian mixture and the alignments that
    need a distribution accept no monotonic normalizer. Coverage needs a score that is linear in its keys, heads need a
    score that reads keys. Alignments that sum over positions accept no heads.
    """
    sections = {score: configuration(f"{score}-global-softmax").score for score in SCORES}
    improper, moving = {"monotonic", "mocha"}, {"monotonic", "mocha", "first_order", "ahead", "fertility"}
    expected = set()
    for parts in itertools.product(SCORES, WINDOWS, NORMALIZERS, ALIGNMENTS, COVERAGES, PROJECTIONS):
        score, window, normalizer, alignment, coverage, heads = parts
        accepted = (
            (window == "global" or normalizer not in moving)
            and (normalizer not in improper or not (alignment or score == "gaussian_mixture"))
            and (not coverage or sections[score].linear_in_keys)
            and (not heads or (sections[score].reads_keys and alignment != "marginal"))
        )
        if accepted:
            expected.add("-".join(filter(None, parts)))
    assert set(COMBINATIONS) == expected


@pytest.mark.parametrize("name", EVERY)
def test_laws_and_equations(name: str) -> None:
    case = Case(name, padding=1)
    kinds = {case.config.normalizer.kind, case.config.alignment.kind}
    modes = (False, True) if DIFFERS_IN_TRAINING & kinds else (False,)
    for training in modes:
        case = case._replace(training=training)
        made = case.make()
        for law in [*LAWS, equals_the_papers]:
            law(case, made)


@pytest.mark.parametrize("law", [*LAWS, equals_the_papers], ids=lambda law: law.__name__)
def test_for_any_sizes_and_either_mode(law: Law) -> None:
    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(cases())
    def holds(case: Case) -> None:
        law(case, case.make())

    holds()


DIFFERENTIABLE = [name for name in CHOSEN if not DRAWING & set(name.split("-"))]
# A window of one position on either side is gathered in a sentence of 9 positions, and masked in one of 5.
LONG, SHORT = (9, 2), (5, 3)
SIZES = [(name, lengths) for lengths in (LONG, SHORT) for name in DIFFERENTIABLE]


def check(case: Case) -> None:
    """Check the gradients of context and weights; monotonic attention runs in training mode."""
    training = case.config.normalizer.kind in {"monotonic", "mocha"}
    attention, query, states, valid = case._replace(training=training).make()

    def attend(query: Tensor, states: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        attended = attention.sequence(query, attention.remember(states, valid))
        return attended.context, attended.weights

    inputs = (query.requires_grad_(), states.requires_grad_(), *attention.parameters())
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        pytest.param(name, lengths, marks=[pytest.mark.slow] if number % 2 or lengths is SHORT else [])
        for number, (name, lengths) in enumerate(SIZES)
    ],
)
def test_gradients_in_directions_drawn_at_random(name: str, lengths: tuple[int, ...]) -> None:
    check(Case(name, lengths))
