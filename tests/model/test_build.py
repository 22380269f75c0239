"""Models built for the parameters of a checkpoint equal the model that was saved; initial values of parameters."""

from typing import Any

import pytest
import torch
from small_models import (
    CHO,
    GNMT,
    HEADS,
    LENGTHS,
    MONOTONIC,
    NONE,
    PAD,
    SELF_ATTENTION,
    SOURCE,
    TARGET,
    V,
    attention,
    values,
)

from nmt.config.schema.model import Model
from nmt.model.build import build_model, build_unfilled

SAMPLED = {"kind": "sampled", "soft_share": 0.5, "baseline": "moving", "discount": 0.9}
SAMPLED |= {"weight": 1.0, "entropy_weight": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": NONE, "encoder__cell": "rnn", "embedding__tie_source_target": False},
        {"attention": CHO, "encoder__cell": "lstm", "decoder__cell": "lstm", "decoder__lexical": False},
        {"attention": attention("normed_additive", normalizer=MONOTONIC), "decoder__lexical": True},
        {"attention": attention("general", window={"kind": "local_p", "reach": 1, "dim": 3}, projection=HEADS)},
        {"attention": attention("location_aware"), "encoder__self_attention": SELF_ATTENTION},
        {"attention": attention("dot", alignment=SAMPLED)},
        {"attention": attention("dot", alignment={**SAMPLED, "baseline": "learned"})},
        {"decoder__fixnorm": True, "decoder__residual": True, "decoder__layers": 2, "encoder__cell": "lstm"},
        GNMT,
    ],
    ids=["none", "cho", "monotonic", "heads", "self_attention", "hard", "learned_baseline", "residual", "gnmt"],
)
def test_filled_it_is_the_model(changes: dict[str, Any]) -> None:
    asked = Model.model_validate(values(**changes)), V, V, (PAD, PAD)
    model = build_model(*asked).eval()
    state = torch.get_rng_state()
    unfilled = build_unfilled(*asked).eval()
    assert torch.equal(torch.get_rng_state(), state)  # building it draws no random numbers
    with torch.device("meta"):
        outline = build_unfilled(*asked)
    weights = model.state_dict()
    shapes = {name: weight.shape for name, weight in weights.items()}
    assert {name: weight.shape for name, weight in outline.state_dict().items()} == shapes
    assert all(weight.is_meta for weight in outline.state_dict().values())
    with torch.no_grad():
        for parameter in unfilled.parameters():
            parameter.fill_(torch.nan)  # as unfilled memory may contain it
    unfilled.load_state_dict(weights)
    torch.manual_seed(1)
    expected = model(SOURCE, LENGTHS, TARGET).readouts
    torch.manual_seed(1)
    assert torch.equal(unfilled(SOURCE, LENGTHS, TARGET).readouts, expected)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_first_weights_are_what_is_said(cell: str) -> None:
    changes = {"attention": attention("additive"), "embedding__tie_source_target": False}
    for side in ("encoder", "decoder"):
        changes |= {f"{side}__cell": cell, f"{side}__layers": 2, f"{side}__hidden": 32}
    config = Model.model_validate(values(**changes, embedding__dim=64, decoder__readout_dim=64))
    model = build_model(config, 500, 400, (PAD, PAD))
    gates = {"gru": 3, "lstm": 4}[cell]
    seen = set()
    for name, weight in model.state_dict().items():
        kind = name.split(".")[-1].split("_l")[0]
        seen.add(kind)
        if kind == "weight_hh":
            for gate in weight.chunk(gates):
                torch.testing.assert_close(gate @ gate.T, torch.eye(len(gate)), rtol=0, atol=1e-5)
        elif kind == "weight_ih":
            rows, columns = weight.shape[0] // gates, weight.shape[1]
            bound = (6 / (rows + columns)) ** 0.5  # Glorot and Bengio 2010, eq. 16, for each gate by itself
            for index, gate in enumerate(weight.chunk(gates)):
                is_candidate_of_lstm = cell == "lstm" and index == 2
                of_gate = 4 * bound if is_candidate_of_lstm else bound
                assert 0.9 * of_gate < gate.abs().max() <= of_gate, name
        elif "bias" in kind:
            assert not weight.any(), name
    assert {"weight_hh", "weight_ih", "bias_ih", "bias_hh"} <= seen
    for table in (model.source_embedding.weight, model.target_embedding.weight):
        assert not table[PAD].any()
        others = torch.cat((table[:PAD], table[PAD + 1 :])).detach()
        assert abs(float(others.norm(dim=1).mean()) - 1) < 0.05
