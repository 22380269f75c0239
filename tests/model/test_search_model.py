"""A model prepared for search computes what the model itself does."""

from typing import Any

import pytest
import torch
from small_models import LENGTHS, SOURCE, TARGET, model_of
from test_model import COMBINATIONS, label

from nmt.model.search_model import SearchModel


@pytest.fixture(params=COMBINATIONS, ids=label)
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.mark.parametrize("hypotheses", [1, 2])
def test_steps_equal_the_models_own(changes: dict[str, Any], hypotheses: int) -> None:
    model = model_of(**changes)
    prepared = SearchModel(model, hypotheses, same)
    own, state = model.encode(SOURCE, LENGTHS), prepared.encode(SOURCE, LENGTHS)
    for t in range(TARGET.shape[1]):
        expected, step = model.step(TARGET[:, t], own), prepared.step(TARGET[:, t], state)
        torch.testing.assert_close(step.logits, expected.logits, rtol=1e-10, atol=1e-10)
        if expected.weights is not None:
            torch.testing.assert_close(step.weights, expected.weights, rtol=1e-10, atol=1e-10)
        own, state = expected.state, step.state
