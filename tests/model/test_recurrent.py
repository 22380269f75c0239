"""The recurrent networks give the same numbers as torch's modules with the same parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nmt.model import recurrent
from nmt.model.recurrent import Recurrent, RecurrentState, UpperLayers, collect_layers, run_rnn, swap_rows

B, T, SIZE, H, M = 4, 6, 3, 5, 2
LENGTHS = torch.tensor([6, 1, 4, 6])
KIND = pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])


def torchs_own(
    rnn: Recurrent, inputs: Tensor, lengths: list[int], start: RecurrentState | None
) -> tuple[Tensor, RecurrentState]:
    """Run torch's module on each sentence by itself, without padding."""
    outputs, finals = torch.zeros(B, T, H * (2 if rnn.bidirectional else 1), dtype=torch.float64), []
    for row, length in enumerate(lengths):
        state: Any = None
        if start is not None:
            hidden, *cell = (torch.stack([layer[row : row + 1] for layer in part]) for part in start if part)
            state = (hidden, *cell) if cell else hidden
        output, final = rnn(inputs[row : row + 1, :length], state)
        outputs[row, :length] = output[0]
        finals.append(final if isinstance(final, tuple) else (final,))
    ways = 2 if rnn.bidirectional else 1
    parts = [torch.cat(part, dim=1)[-ways:].unbind(0) for part in zip(*finals, strict=True)]
    return outputs, RecurrentState(parts[0], parts[1] if len(parts) > 1 else ())


@KIND
@pytest.mark.parametrize("lengths", [None, [6, 1, 4, 6]])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, True), (2, False), (2, True)])
def test_outputs_last_states_and_gradients_are_torchs(
    kind: type[Recurrent], bidirectional: bool, layers: int, lengths: list[int] | None
) -> None:
    rnn = kind(SIZE, H, layers, batch_first=True, bidirectional=bidirectional).double()
    inputs = torch.randn(B, T, SIZE, dtype=torch.float64, requires_grad=True)
    states = [torch.randn(layers, B, H, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    start = None
    if not bidirectional:
        start = RecurrentState(states[0].unbind(0), states[1].unbind(0) if kind is nn.LSTM else ())
    given = [inputs, *rnn.parameters(), *([] if start is None else states[: 2 if kind is nn.LSTM else 1])]
    asked = None if lengths is None and not bidirectional else torch.tensor(lengths or [T] * B)
    numbers = []
    for outputs, final in (
        run_rnn(rnn, inputs, asked, start),
        torchs_own(rnn, inputs, lengths or [T] * B, start),
    ):
        values = [outputs, *final.hidden, *final.cell]
        loss = torch.stack([value.sin().sum() * (i + 1) for i, value in enumerate(values)]).sum()
        numbers.append([*values, *torch.autograd.grad(loss, given)])
    for ours, theirs in zip(*numbers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@KIND
@pytest.mark.parametrize(("residual", "p"), [(2, 0.0), (3, 0.0), (3, 1.0)])
def test_residual_connections_add_each_upper_layers_input_to_its_output(
    kind: type[Recurrent], residual: int, p: float
) -> None:
    """The sum is taken from layer `residual` on, and before dropout (Wu et al. 2016, 3.1)."""
    rnn = kind(SIZE, H, 4, batch_first=True, dropout=p).double()
    inputs, single = torch.randn(B, T, SIZE).double(), []
    for number in range(4):
        layer = kind(H if number else SIZE, H, batch_first=True).double()
        layer.load_state_dict({name: getattr(rnn, name.replace("_l0", f"_l{number}")) for name in layer.state_dict()})
        single.append(layer)
    expected = inputs
    for number, layer in enumerate(single, 1):
        output = layer(expected * (1 - p) if number > 1 else expected)[0]
        expected = expected + output if number >= residual else output
    outputs, final = run_rnn(rnn, inputs, residual=residual)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(final.hidden[0], expected[:, -1])


def test_dropout_between_layers_acts_in_training_only() -> None:
    """Tests dropout of the layer below, and of the context that `UpperLayers` read."""
    rnn, inputs = nn.GRU(SIZE, H, 2, batch_first=True, dropout=0.5), torch.randn(B, T, SIZE)
    assert not torch.equal(run_rnn(rnn, inputs)[0], run_rnn(rnn, inputs)[0])
    rnn.eval()
    torch.testing.assert_close(run_rnn(rnn, inputs)[0], rnn(inputs)[0])
    upper, context = UpperLayers([nn.GRU(SIZE + M, H, batch_first=True)], dropout=0.5), torch.randn(B, T, M)
    for below, beside in ((inputs, torch.zeros_like(context)), (torch.zeros_like(inputs), context)):
        one, two = (upper(below, RecurrentState((), ()), upper.collect_layers(), context=beside)[0] for _ in range(2))
        assert not torch.equal(one, two)


def test_no_call_that_may_be_recorded_uses_cudnns_dropout_state(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(recurrent, "_run_torch", lambda *_: calls.append("torch's"))
    rnn = nn.GRU(SIZE, H, 2, batch_first=True, dropout=0.5)
    inputs, lowest = torch.empty(B, T, SIZE, device="meta"), collect_layers(rnn)[:1]
    run_rnn(rnn, inputs, LENGTHS)  # a call with lengths on the CPU is not recorded
    run_rnn(rnn.eval(), inputs)
    assert calls == ["torch's"] * 2
    monkeypatch.setattr(recurrent, "_run_layer", lambda *_: (inputs, calls.append("the loop")))
    run_rnn(rnn.train(), inputs, layers=lowest)
    assert calls[2:] == ["the loop"]


def test_swapped_rows_take_their_gradients_back() -> None:
    index = torch.tensor([2, 1, 0, 3])
    tensor = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(swap_rows(tensor, index), tensor[index])
    assert torch.autograd.gradcheck(swap_rows, (tensor, index))
