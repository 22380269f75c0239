"""Our single steps against torch's own recurrent networks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nmt.model.recurrent import RecurrentState, layer_weights, step_layer
from nmt.ops.rows import select


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_steps_equal_torchs_network(kind: type[nn.RNN] | type[nn.GRU] | type[nn.LSTM]) -> None:
    rnn = kind(5, 7, batch_first=True).double()
    inputs = torch.randn(3, 4, 5).double()
    start = torch.randn(1, 3, 7).double()
    memory = torch.randn(1, 3, 7).double()
    whole, _ = rnn(inputs, (start, memory)) if kind is nn.LSTM else rnn(inputs, start)
    weights = layer_weights(rnn, 0)
    state = RecurrentState((start[0],), (memory[0],) if kind is nn.LSTM else ())
    for t in range(4):
        gates = F.linear(inputs[:, t], weights.weight_ih, weights.bias_ih)
        hidden, new_memory = step_layer(rnn, weights, gates, *state.of(0))
        torch.testing.assert_close(hidden, whole[:, t], rtol=1e-12, atol=1e-12)
        state = RecurrentState((hidden,), () if new_memory is None else (new_memory,))


def test_select_takes_rows_of_every_layer() -> None:
    state = RecurrentState(
        (torch.arange(3.0)[:, None], torch.arange(3.0)[:, None] + 10), (torch.arange(3.0)[:, None] + 20,)
    )
    chosen = select(state, torch.tensor([2, 0]))
    assert [layer.flatten().tolist() for layer in (*chosen.hidden, *chosen.cell)] == [[2, 0], [12, 10], [22, 20]]
