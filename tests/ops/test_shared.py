"""What a loop remembers, and what it forgets."""

from typing import Any

import torch
from torch import Tensor

from nmt.ops.shared import _loop, defer_gradient, loop


def nothing(gathered: list[Any]) -> tuple[Tensor | None, ...]:
    return (None, None)


def test_a_loop_knows_the_same_tensors_again() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    with loop():
        first = defer_gradient((one, other), nothing)
        assert defer_gradient((one, other), nothing) is first
        assert defer_gradient((one, None), nothing) is not first
        assert defer_gradient((other, one), nothing) is not first
    assert defer_gradient((one, other), nothing) is not first


def test_what_is_gone_is_forgotten() -> None:
    """Its id may be another's, and what was made of it takes room."""
    with loop():
        tensor = torch.zeros(2)
        defer_gradient((tensor,), nothing)
        known = _loop.get()
        assert known is not None
        assert len(known) == 1
        del tensor
        assert not known
