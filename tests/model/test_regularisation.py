"""What recurrent networks have beyond torch's own: its laws, and layer normalisation against the paper's equations.

Shapes: B batch, T positions, I inputs, H hidden.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nmt.model import recurrent
from nmt.model.recurrent import (
    Recurrent,
    RecurrentOptions,
    RecurrentState,
    Regularisation,
    _loop,
    layer_weights,
    run_rnn,
    step_layer,
    zone_out,
)

Array = NDArray[np.float64]
B, T, SIZE, H = 4, 6, 3, 16
LENGTHS = torch.tensor([6, 1, 4, 6])
KINDS = [nn.RNN, nn.GRU, nn.LSTM]
CELLS = {nn.RNN: nn.RNNCell, nn.GRU: nn.GRUCell, nn.LSTM: nn.LSTMCell}
BOTH = pytest.mark.parametrize("bidirectional", [False, True])
KIND = pytest.mark.parametrize("kind", KINDS)


def network(kind: type[Recurrent], layers: int = 1, **given: Any) -> Recurrent:  # noqa: ANN401
    return kind(SIZE, H, layers, batch_first=True, **given).double()


def made(rnn: Recurrent, **options: Any) -> Regularisation:  # noqa: ANN401
    """With random parameters: none is left at its first value."""
    regularisation = Regularisation(rnn, RecurrentOptions(**options)).double()
    for parameter in regularisation.parameters():
        nn.init.normal_(parameter)
    return regularisation


@pytest.fixture
def inputs() -> Tensor:
    return torch.randn(B, T, SIZE, dtype=torch.float64)


def differ(rows: Tensor) -> bool:
    """Are no two of the first dimension alike?"""
    return len(rows.unique(dim=0)) == len(rows)


@KIND
def test_without_options_nothing_is_drawn_or_added(kind: type[Recurrent]) -> None:
    rnn = network(kind, 2, dropout=0.5)
    before = torch.get_rng_state()
    plain = Regularisation(rnn, RecurrentOptions())
    prepared = plain.prepare(rnn, B)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(plain.parameters()) == []
    for layer, weights in enumerate(prepared):
        parameters = layer_weights(rnn, layer)
        assert all(one is other for one, other in zip(weights[:4], parameters[:4], strict=True))
        assert weights[4:] == parameters[4:] == (None, None, None, 0.0, False, (), None, None)


@BOTH
@KIND
def test_recurrent_dropout_is_one_mask_a_sentence_on_what_enters_the_recurrent_matrix(
    kind: type[Recurrent], bidirectional: bool, inputs: Tensor
) -> None:
    """And what a gate carries on of the state is whole: the same as torch's own cell step by step."""
    rnn = network(kind, bidirectional=bidirectional)
    (weights,) = made(rnn, recurrent_dropout=0.5).prepare(rnn, B)
    masks = weights.hidden_mask
    assert masks is not None
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert differ(masks.flatten(0, -2))  # sentences and directions
    outputs, _ = _loop(rnn, inputs, torch.full((B,), T), None, [weights])
    cell = CELLS[kind](SIZE, H).double()
    for direction, mask in enumerate(masks if bidirectional else [masks]):
        suffix = "_l0" + "_reverse" * direction
        cell.load_state_dict({name: getattr(rnn, name + suffix) for name in cell.state_dict()})
        # A mask on the columns of each sentence's own matrix.
        for b in range(B):
            own = torch.func.functional_call
            changed = {**dict(cell.named_parameters()), "weight_hh": cell.weight_hh * mask[b]}
            state: Any = None
            for t in reversed(range(T)) if direction else range(T):
                state = own(cell, changed, (inputs[b, t], state))
                hidden = state[0] if kind is nn.LSTM else state
                found = outputs[b, t, direction * H : (direction + 1) * H]
                torch.testing.assert_close(found, hidden, rtol=1e-10, atol=1e-10)


def test_a_gate_that_carries_all_carries_the_whole_state(inputs: Tensor) -> None:
    """Through every step, whatever recurrent dropout drops."""
    for kind in (nn.GRU, nn.LSTM):
        rnn = network(kind)
        with torch.no_grad():
            for bias in (rnn.bias_ih_l0, rnn.bias_hh_l0):
                bias.zero_()
            rnn.bias_ih_l0[H : 2 * H] = 1e3  # a GRU's update gate, an LSTM's forget gate
            if kind is nn.LSTM:
                rnn.bias_ih_l0[:H] = -1e3  # and nothing is let in
        start = torch.randn(B, H, dtype=torch.float64)
        state = RecurrentState((start,), (start,) if kind is nn.LSTM else ())
        outputs, final = run_rnn(rnn, inputs, None, state, made(rnn, recurrent_dropout=0.9))
        assert torch.equal(final.cell[0] if kind is nn.LSTM else outputs[:, -1], start)


@BOTH
@KIND
def test_weight_drop_changes_the_recurrent_matrix_alone(kind: type[Recurrent], bidirectional: bool) -> None:
    rnn = network(kind, 2, bidirectional=bidirectional)
    regularisation = made(rnn, weight_drop=0.4)
    for layer, weights in enumerate(regularisation.prepare(rnn, B)):
        plain = layer_weights(rnn, layer)
        kept = weights.weight_hh != 0
        torch.testing.assert_close(weights.weight_hh, torch.where(kept, plain.weight_hh / 0.6, 0.0))
        assert not kept.all()
        for name in ("weight_ih", "bias_ih", "bias_hh"):
            assert torch.equal(getattr(weights, name), getattr(plain, name))
    rnn.eval()
    assert torch.equal(regularisation.prepare(rnn, B)[0].weight_hh, layer_weights(rnn, 0).weight_hh)


def test_weights_that_are_dropped_have_no_gradient(inputs: Tensor) -> None:
    rnn = network(nn.GRU)
    layers = made(rnn, weight_drop=0.4).prepare(rnn, B)
    outputs, _ = _loop(rnn, inputs, None, None, layers)
    outputs.sum().backward()
    assert torch.equal(rnn.weight_hh_l0.grad != 0, layers[0].weight_hh != 0)


@BOTH
def test_variational_dropout_between_layers_is_the_same_at_all_positions(bidirectional: bool, inputs: Tensor) -> None:
    rnn = network(nn.GRU, 2, dropout=0.5, bidirectional=bidirectional)
    lower, upper = made(rnn, variational=True).prepare(rnn, B)
    assert lower.input_mask is None
    assert upper.input_mask is not None
    assert differ(upper.input_mask)
    outputs, _ = _loop(rnn, inputs, LENGTHS, None, [lower, upper])
    below, _ = _loop(rnn, inputs, LENGTHS, None, [lower])
    above, _ = _loop(rnn, below * upper.input_mask[:, None], LENGTHS, None, [upper])
    assert torch.equal(outputs, above)


@pytest.mark.parametrize("residual", [2, 3])
@BOTH
@KIND
def test_residual_connections_add_each_upper_layers_input_to_its_output(
    kind: type[Recurrent], bidirectional: bool, residual: int, inputs: Tensor
) -> None:
    rnn = network(kind, 3, bidirectional=bidirectional)
    layers = made(rnn, residual=residual).prepare(rnn, B)
    outputs, final = _loop(rnn, inputs, LENGTHS, None, layers)
    expected, _ = _loop(rnn, inputs, LENGTHS, None, layers[: residual - 1])
    for layer in layers[residual - 1 :]:
        expected = expected + _loop(rnn, expected, LENGTHS, None, [layer._replace(residual=False)])[0]
    torch.testing.assert_close(outputs, expected)
    assert not torch.equal(outputs, _loop(rnn, inputs, LENGTHS, None)[0])
    last = outputs[torch.arange(B), LENGTHS - 1]
    torch.testing.assert_close(final.hidden[0], last[:, :H])
    if bidirectional:
        torch.testing.assert_close(final.hidden[1], outputs[:, 0, H:])


@KIND
def test_zoneout_keeps_units_of_state_and_memory_each_step_anew(kind: type[Recurrent]) -> None:
    rnn = network(kind)
    weights = layer_weights(rnn, 0)._replace(zoneout=0.5)
    rows = 50
    hidden, memory = torch.randn(2, rows, H, dtype=torch.float64)
    before = (hidden, memory if kind is nn.LSTM else None)
    new = step_layer(rnn, weights, torch.randn(rows, weights.weight_ih.shape[0], dtype=torch.float64), *before)
    kept = []
    for _ in range(2):
        after = zone_out(rnn, weights, new, before)
        for one, old, stepped in zip(after, before, new, strict=True):
            if one is not None:
                kept.append(one == old)
                assert torch.equal(one, torch.where(kept[-1], old, stepped))
    assert differ(torch.stack(kept))
    rnn.eval()
    for one, old, stepped in zip(zone_out(rnn, weights, new, before), before, new, strict=True):
        if one is not None:
            torch.testing.assert_close(one, (old + stepped) / 2)


@pytest.mark.parametrize("training", [False, True])
@KIND
def test_with_zoneout_of_one_nothing_ever_happens(kind: type[Recurrent], training: bool, inputs: Tensor) -> None:
    rnn = network(kind).train(training)
    start = torch.randn(B, H, dtype=torch.float64)
    state = RecurrentState((start,), (start,) if kind is nn.LSTM else ())
    outputs, final = run_rnn(rnn, inputs, None, state, made(rnn, zoneout=1.0))
    assert torch.equal(outputs, start[:, None].expand(-1, T, -1))
    assert all(torch.equal(part, start) for part in (*final.hidden, *final.cell))


@BOTH
@KIND
def test_transitions_are_further_cells_without_input(
    kind: type[Recurrent], bidirectional: bool, inputs: Tensor
) -> None:
    """Of torch's own cell, whose input is zero; the next position goes on from the last of them."""
    rnn = network(kind, bidirectional=bidirectional)
    regularisation = made(rnn, transition_depth=2)
    outputs, _ = run_rnn(rnn, inputs, torch.full((B,), T), regularisation=regularisation)
    cell = CELLS[kind](SIZE, H).double()
    for direction in range(1 + bidirectional):
        suffix = "_l0" + "_reverse" * direction
        first = {name: getattr(rnn, name + suffix) for name in cell.state_dict()}
        steps = [first, *(first | _suffixed(each, suffix) for each in regularisation.transitions)]
        state: Any = None
        for t in reversed(range(T)) if direction else range(T):
            for k, parameters in enumerate(steps):
                seen = inputs[:, t] if k == 0 else torch.zeros(B, SIZE, dtype=torch.float64)
                state = torch.func.functional_call(cell, parameters, (seen, state))
            hidden = state[0] if kind is nn.LSTM else state
            torch.testing.assert_close(outputs[:, t, direction * H : (direction + 1) * H], hidden)


def _suffixed(module: nn.Module, suffix: str) -> dict[str, nn.Parameter]:
    return {name.removesuffix(suffix): each for name, each in module.named_parameters() if name.endswith(suffix)}


@KIND
def test_zoneout_keeps_what_was_before_all_transitions(kind: type[Recurrent], inputs: Tensor) -> None:
    rnn = network(kind).eval()
    start = torch.randn(B, H, dtype=torch.float64)
    state = RecurrentState((start,), (start,) if kind is nn.LSTM else ())
    regularisation = made(rnn, transition_depth=2)
    whole, _ = run_rnn(rnn, inputs[:, :1], None, state, regularisation)
    regularisation.options = regularisation.options._replace(zoneout=0.25)
    kept, _ = run_rnn(rnn, inputs[:, :1], None, state, regularisation)
    torch.testing.assert_close(kept[:, 0], 0.25 * start + 0.75 * whole[:, 0])


@KIND
def test_what_regularises_steps_regularises_transitions(kind: type[Recurrent]) -> None:
    rnn = network(kind)
    (weights,) = made(rnn, transition_depth=2, recurrent_dropout=0.5, weight_drop=0.4, layer_norm=True).prepare(rnn, B)
    assert len(weights.transitions) == 2
    masks = [weights.hidden_mask, *(each.hidden_mask for each in weights.transitions)]
    assert differ(torch.stack([each for each in masks if each is not None]))
    for each in weights.transitions:
        assert 0.3 < (each.weight_hh == 0).double().mean() < 0.5
        assert each.norms is not None
        assert each.norms.input is None
        assert (each.norms.cell is not None) == (kind is nn.LSTM)


def normed(x: Array, gain: Array, bias: Array) -> Array:
    """Ba et al. 2016, eq. 4."""
    return gain * (x - x.mean()) / np.sqrt(x.var() + 1e-5) + bias


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def paper_step(p: dict[str, Array], place: str, x: Array, hidden: Array, memory: Array) -> tuple[Array, Array]:
    """Ba et al. 2016, supplement, with the reset gate after the product, as here: one sentence, one step."""
    wx, uh = p[f"weight_ih{place}"] @ x, p[f"weight_hh{place}"] @ hidden
    (g, b), (k, d) = ((p[f"gain_{each}{place}"], p[f"bias_{each}{place}"]) for each in ("ih", "hh"))
    if len(wx) == H:
        return np.tanh(normed(wx, g, b) + normed(uh, k, d)), memory
    if len(wx) == 3 * H:
        gates, new = slice(0, 2 * H), slice(2 * H, None)
        both = sigmoid(normed(wx[gates], g[gates], b[gates]) + normed(uh[gates], k[gates], d[gates]))
        reset, update = both[:H], both[H:]
        candidate = np.tanh(normed(wx[new], g[new], b[new]) + reset * normed(uh[new], k[new], d[new]))
        return (1 - update) * candidate + update * hidden, memory
    input_gate, forget, new, output_gate = (normed(wx, g, b) + normed(uh, k, d)).reshape(4, H)
    memory = sigmoid(forget) * memory + sigmoid(input_gate) * np.tanh(new)
    shown = normed(memory, p[f"gain_memory{place}"], p[f"bias_memory{place}"])
    return sigmoid(output_gate) * np.tanh(shown), memory


@BOTH
@KIND
def test_layer_normalisation_equals_the_paper(kind: type[Recurrent], bidirectional: bool, inputs: Tensor) -> None:
    rnn = network(kind, 2, bidirectional=bidirectional)
    regularisation = made(rnn, layer_norm=True)
    assert regularisation.norm is not None
    outputs, final = run_rnn(rnn, inputs, LENGTHS, regularisation=regularisation)
    named = itertools.chain(rnn.named_parameters(), regularisation.norm.named_parameters())
    p = {name: parameter.detach().numpy() for name, parameter in named}
    for b, length in enumerate(LENGTHS.tolist()):
        xs = list(inputs[b, :length].numpy())
        for layer in range(2):
            ways = []
            for way in ("", "_reverse")[: 1 + bidirectional]:
                state, states = (np.zeros(H), np.zeros(H)), []
                for x in xs[:: -1 if way else 1]:
                    state = paper_step(p, f"_l{layer}{way}", x, *state)
                    states.append(state)
                ways.append(states)
            xs = [np.concatenate([ways[0][t][0], *(way[length - 1 - t][0] for way in ways[1:])]) for t in range(length)]
        np.testing.assert_allclose(outputs[b, :length].detach().numpy(), np.stack(xs), rtol=0, atol=1e-10)
        for d, states in enumerate(ways):
            np.testing.assert_allclose(final.hidden[d][b].detach().numpy(), states[-1][0], rtol=0, atol=1e-10)
            if kind is nn.LSTM:
                np.testing.assert_allclose(final.cell[d][b].detach().numpy(), states[-1][1], rtol=0, atol=1e-10)


@BOTH
@KIND
def test_layer_normalisation_knows_no_scale_of_a_matrix(
    kind: type[Recurrent], bidirectional: bool, inputs: Tensor
) -> None:
    """Each matrix has a scale of its own, so large that what is added to the variance does not count."""
    rnn = network(kind, 2, bidirectional=bidirectional)
    ways: list[list[Tensor]] = []
    for regularisation in (made(rnn, layer_norm=True), made(rnn)):
        ways.append([])
        for scale in (1e3, 7.0):
            with torch.no_grad():
                for name, parameter in rnn.named_parameters():
                    parameter.mul_({"weight_ih": scale, "weight_hh": scale + 4}.get(name[:9], 1.0))
            ways[-1].append(run_rnn(rnn, inputs, LENGTHS, regularisation=regularisation)[0])
        rnn.reset_parameters()
    torch.testing.assert_close(*ways[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(*ways[1], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("options", [{"layer_norm": True}, {"layer_norm": True, "residual": 2, "zoneout": 0.3}])
@BOTH
@KIND
def test_gradients(kind: type[Recurrent], bidirectional: bool, options: dict[str, Any]) -> None:
    rnn = network(kind, 2, bidirectional=bidirectional).eval()
    regularisation = made(rnn, **options)
    inputs = torch.randn(2, 3, SIZE, dtype=torch.float64, requires_grad=True)

    def everything(given: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        outputs, final = run_rnn(rnn, given, torch.tensor([3, 2]), regularisation=regularisation)
        return outputs, *final.hidden, *final.cell

    parameters = [*rnn.parameters(), *regularisation.parameters()]
    assert torch.autograd.gradcheck(everything, (inputs, *parameters), fast_mode=True)


ALONE: list[tuple[dict[str, Any], str]] = [
    ({}, "never"),
    ({"variational": True}, "training"),
    ({"recurrent_dropout": 0.1}, "training"),
    ({"weight_drop": 0.1}, "training"),
    ({"zoneout": 0.1}, "always"),
    ({"layer_norm": True}, "always"),
    ({"residual": 2}, "always"),
    ({"transition_depth": 1}, "always"),
]


@pytest.mark.parametrize(("options", "when"), ALONE, ids=str)
def test_torchs_own_call_is_made_where_it_knows_all(
    options: dict[str, Any], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off the CPU, that is; and the loop keeps to the device of its inputs."""
    rnn = nn.GRU(SIZE, H, 2, batch_first=True, dropout=0.1, bidirectional=True).to("meta")
    regularisation = Regularisation(rnn, RecurrentOptions(**options)).to("meta")
    called: list[str] = []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know this device
    monkeypatch.setattr(recurrent, "_run_torch", lambda *_: called.append("library"))
    for training, expected in ((True, when == "never"), (False, when != "always")):
        called.clear()
        found = run_rnn(
            rnn.train(training), torch.randn(B, T, SIZE, device="meta"), LENGTHS, regularisation=regularisation
        )
        assert (called == ["library"]) == expected
        if found is not None:
            assert found[0].shape == (B, T, 2 * H)
            assert found[0].device.type == "meta"


def test_the_loop_of_an_lstm_with_everything_keeps_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    rnn = nn.LSTM(SIZE, H, 3, batch_first=True, dropout=0.1).to("meta")
    regularisation = Regularisation(rnn, RecurrentOptions(True, 0.1, 0.1, 0.1, True, 2, 2)).to("meta")
    for training in (True, False):
        outputs, final = run_rnn(
            rnn.train(training), torch.randn(B, T, SIZE, device="meta"), LENGTHS, regularisation=regularisation
        )
        assert {part.device.type for part in (outputs, *final.hidden, *final.cell)} == {"meta"}


@BOTH
def test_bf16_stays_near_fp32(bidirectional: bool) -> None:
    for kind in KINDS:
        rnn = kind(32, 16, 2, batch_first=True, bidirectional=bidirectional).eval()
        regularisation = Regularisation(rnn, RecurrentOptions(layer_norm=True, zoneout=0.2))
        inputs = torch.randn(B, T, 32)
        exact, _ = run_rnn(rnn, inputs, LENGTHS, regularisation=regularisation)
        with torch.autocast("cpu", torch.bfloat16):
            rough, _ = run_rnn(rnn, inputs, LENGTHS, regularisation=regularisation)
        torch.testing.assert_close(rough.float(), exact, rtol=0, atol=0.1)
        rough.float().sum().backward()
        assert all(each.grad.dtype == torch.float32 for each in [*rnn.parameters(), *regularisation.parameters()])
