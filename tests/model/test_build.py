"""A model made for a checkpoint's weights is, with them, the model that they are from."""

from typing import Any

import pytest
import torch
from small_models import CHO, LENGTHS, NONE, PAD, SELF_ATTENTION, SOURCE, TARGET, V, attention, regularised, values

from nmt.config.schema import Model
from nmt.model.build import build_model, build_unfilled

MONOTONIC = {"kind": "monotonic", "noise": 1.0, "initial_offset": 1.0}
HARD = {
    "kind": "hard",
    "expected": 0.5,
    "baseline": "moving",
    "discount": 0.9,
    "weight": 1.0,
    "entropy_weight": 0.0,
}
HEADS = {"kind": "heads", "heads": 2, "dim": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": NONE, "encoder__cell": "rnn", "embedding__tie_source_target": False},
        {"attention": CHO, "encoder__cell": "lstm", "decoder__cell": "lstm", "decoder__lexical": False},
        {"attention": attention("normed_additive", normalizer=MONOTONIC), "decoder__lexical": True},
        {"attention": attention("general", window={"kind": "local_p", "reach": 1, "dim": 3}, projection=HEADS)},
        {"attention": attention("location_aware"), "encoder__self_attention": SELF_ATTENTION},
        {"attention": attention("dot", normalizer=HARD)},
        {"decoder__fixnorm": True, **regularised("lstm", attention=attention("additive"))},
    ],
    ids=["none", "cho", "monotonic", "heads", "self_attention", "hard", "regularised"],
)
def test_filled_it_is_the_model(changes: dict[str, Any]) -> None:
    asked = Model.model_validate(values(**changes)), V, V, (PAD, PAD)
    model = build_model(*asked).eval()
    state = torch.get_rng_state()
    unfilled = build_unfilled(*asked).eval()
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    with torch.device("meta"):
        outline = build_unfilled(*asked)
    weights = model.state_dict()
    shapes = {name: weight.shape for name, weight in weights.items()}
    assert {name: weight.shape for name, weight in outline.state_dict().items()} == shapes
    assert all(weight.is_meta for weight in outline.state_dict().values())
    with torch.no_grad():
        for parameter in unfilled.parameters():
            parameter.fill_(torch.nan)  # which memory may hold as well
    unfilled.load_state_dict(weights)
    torch.manual_seed(1)
    expected = model(SOURCE, LENGTHS, TARGET).readouts
    torch.manual_seed(1)
    assert torch.equal(unfilled(SOURCE, LENGTHS, TARGET).readouts, expected)
