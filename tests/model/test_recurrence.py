"""Our loop over a recurrent network against torch's own call: the same parameters, the same numbers."""

import pytest
import torch
from torch import Tensor, nn

from nmt.model.recurrent import Recurrent, RecurrentState, _loop, _run_torch

B, T, SIZE, H = 4, 6, 3, 5
WAYS = {"loop": _loop, "library": _run_torch}


@pytest.mark.parametrize("lengths", [None, [6, 1, 4, 6], [3, 3, 2, 5]])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_loop_equals_library(
    kind: type[Recurrent], bidirectional: bool, layers: int, lengths: list[int] | None
) -> None:
    if bidirectional and lengths is None:
        lengths = [T] * B
    rnn = kind(SIZE, H, layers, batch_first=True, bidirectional=bidirectional).double()
    inputs = torch.randn(B, T, SIZE, dtype=torch.float64, requires_grad=True)
    start = None
    if not bidirectional:
        parts = 2 if kind is nn.LSTM else 1
        start = [torch.randn(layers, B, H, dtype=torch.float64, requires_grad=True) for _ in range(parts)]
    found = {way: everything(way, rnn, inputs, lengths, start) for way in WAYS}
    for ours, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def everything(
    way: str, rnn: Recurrent, inputs: Tensor, lengths: list[int] | None, start: list[Tensor] | None
) -> list[Tensor]:
    """Outputs, last states, and the gradients of numbers that depend on all of them."""
    state = None
    if start is not None:
        hidden, *memory = (tuple(part.unbind(0)) for part in start)
        state = RecurrentState(hidden, memory[0] if memory else ())
    outputs, final = WAYS[way](rnn, inputs, None if lengths is None else torch.tensor(lengths), state)
    values = [outputs, *final.hidden, *final.cell]
    loss = torch.stack([value.sin().sum() * (i + 1) for i, value in enumerate(values)]).sum()
    return [*values, *torch.autograd.grad(loss, [inputs, *(start or []), *rnn.parameters()])]


def test_dropout_between_layers_only_in_training() -> None:
    rnn = nn.GRU(SIZE, H, 2, batch_first=True, dropout=0.5)
    inputs = torch.randn(B, T, SIZE)
    first, second = (_loop(rnn, inputs, None, None)[0] for _ in range(2))
    assert not torch.equal(first, second)
    rnn.eval()
    torch.testing.assert_close(_loop(rnn, inputs, None, None)[0], _run_torch(rnn, inputs, None, None)[0])
