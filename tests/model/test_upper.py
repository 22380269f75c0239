"""Upper layers as modules of one layer: what is outside the modules, and what torch's own call computes."""

from typing import Any

import pytest
import torch
from small_models import model_of
from test_regularisation import KIND, LENGTHS, SIZE, B, H, T
from torch import Tensor, nn

from nmt.model import recurrent
from nmt.model.recurrent import Recurrent, RecurrentOptions, RecurrentState, UpperLayers

M = 5


def upper_layers(kind: type[Recurrent], context: int, dropout: float = 0.0, **options: Any) -> UpperLayers:  # noqa: ANN401
    """The second layer above one of SIZE units, and the third."""
    layers = [kind(below + context, H, batch_first=True).double() for below in (SIZE, H)]
    for rnn in layers:
        rnn.dropout = dropout
    return UpperLayers(layers, RecurrentOptions(**options)).double()


def outputs_of(upper: UpperLayers, below: Tensor, context: Tensor | None = None) -> Tensor:
    outputs: Tensor = upper(below, RecurrentState((), ()), upper.prepare(B), LENGTHS, context=context)[0]
    return outputs


def zeros_of(upper: UpperLayers, below: Tensor, context: Tensor) -> Tensor:
    """Where the input of the second layer is zero."""
    inputs: list[Tensor] = []
    loop = recurrent._run_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "_run_layer", lambda *given: inputs.append(given[2]) or loop(*given))
        outputs_of(upper, below, context)
    return inputs[0] == 0


@KIND
def test_each_layer_reads_the_context_beside_the_layer_below(kind: type[Recurrent]) -> None:
    upper = upper_layers(kind, M, residual=3)
    below, context = torch.randn(B, T, SIZE).double(), torch.randn(B, T, M).double()
    found = outputs_of(upper, below, context)
    second, third = upper.layers
    for row, length in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1), slice(length)
        middle, _ = second(torch.cat([below[one], context[one]], dim=-1))
        top, _ = third(torch.cat([middle, context[one]], dim=-1))
        torch.testing.assert_close(found[one], middle + top)
        assert not found[row, length:].any()


@pytest.mark.parametrize("variational", [False, True])
def test_dropout_is_on_the_whole_input(variational: bool) -> None:
    """In training only; with one mask a sentence, the same at all positions."""
    upper = upper_layers(nn.LSTM, M, 0.5, variational=variational)
    below, context = torch.ones(B, T, SIZE).double(), torch.ones(B, T, M).double()
    zeros = zeros_of(upper, below, context)
    assert 0.2 < zeros.double().mean() < 0.8
    assert (zeros == zeros[:, :1]).all() == variational
    for part in (zeros[:, :, :SIZE], zeros[:, :, SIZE:]):
        assert part.any()
        assert not part.all()
    assert not zeros_of(upper.eval(), below, context).any()


@pytest.mark.parametrize("layers", [2, 3])
def test_models_drop_between_their_layers(layers: int) -> None:
    changes = {"encoder__bidirectional": "first", "encoder__hidden": 8, "decoder__attend": "first_layer"}
    sizes = {"encoder__layers": layers, "decoder__layers": layers}
    model = model_of(**changes, **sizes, encoder__dropout=0.25, decoder__dropout=0.5)
    networks = [model.encoder.rnn, *model.encoder.upper.layers, model.decoder.rnn, *model.decoder.upper.layers]
    assert [rnn.dropout for rnn in networks] == [0.25] * layers + [0.5] * layers


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"variational": True, "residual": 3}, True), ({"layer_norm": True}, False), ({"recurrent_dropout": 0.1}, False)],
    ids=str,
)
def test_torchs_own_call_is_made_despite_what_is_outside_the_modules(
    options: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper = upper_layers(nn.LSTM, SIZE, 0.5, **options).to("meta")
    called: list[str] = []
    library = recurrent._run_torch
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know this device
    monkeypatch.setattr(recurrent, "_run_torch", lambda *given: called.append("library") or library(*given))
    below = torch.randn(B, T, SIZE, device="meta", dtype=torch.float64)
    layers = upper.prepare(B)
    upper(below, RecurrentState((), ()), layers, context=below)
    assert called == ["library"] * (2 * expected)
