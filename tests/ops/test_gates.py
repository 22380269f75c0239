"""The pointwise part of a GRU's and an LSTM's step."""

import torch
from torch import nn
from torch.nn import functional as F

from nmt.ops.gates import gru_gates, lstm_gates


def test_a_gru_equals_torchs_cell() -> None:
    cell = nn.GRUCell(3, 4).double()
    inputs, hidden = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    gates = F.linear(inputs, cell.weight_ih, cell.bias_ih)
    recurrent = F.linear(hidden, cell.weight_hh, cell.bias_hh)
    torch.testing.assert_close(gru_gates(gates, recurrent, hidden), cell(inputs, hidden), rtol=1e-12, atol=1e-12)


def test_gradient_of_a_gru() -> None:
    for shape in ((3, 4), (2, 3, 4)):
        gates, recurrent = (torch.randn(*shape[:-1], 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
        hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(gru_gates, (gates, recurrent, hidden))


def test_each_gradient_of_a_gru_has_the_type_of_its_tensor() -> None:
    gates, recurrent = (torch.randn(2, 12, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    hidden = torch.randn(2, 4, requires_grad=True)
    found = torch.autograd.grad(gru_gates(gates, recurrent, hidden).sum(), [gates, recurrent, hidden])
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_an_lstm_equals_torchs_cell() -> None:
    cell = nn.LSTMCell(3, 4).double()
    inputs, hidden, memory = (torch.randn(2, n, dtype=torch.float64) for n in (3, 4, 4))
    gates = F.linear(inputs, cell.weight_ih, cell.bias_ih)
    recurrent = F.linear(hidden, cell.weight_hh, cell.bias_hh)
    expected = cell(inputs, (hidden, memory))
    torch.testing.assert_close(lstm_gates(gates, recurrent, memory), expected, rtol=1e-12, atol=1e-12)


def test_an_lstm_keeps_its_memory_as_precise_as_it_came() -> None:
    gates, recurrent = (torch.randn(2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    memory = torch.randn(2, 4, requires_grad=True)
    hidden, new = lstm_gates(gates, recurrent, memory)
    assert (hidden.dtype, new.dtype) == (torch.float32, torch.float32)
    found = torch.autograd.grad(hidden.sum() + new.sum(), [gates, recurrent, memory])
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
