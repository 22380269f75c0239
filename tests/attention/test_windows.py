"""Windows in long sentences: which positions they read; test_combinations compares their equations."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.attention.attention import Attention
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import LocationScore
from nmt.attention.windows import LocalMonotonicWindow


@given(
    centre=st.one_of(st.floats(0, 1), st.integers(0, 12).map(lambda i: i / 12)),
    length=st.integers(4, 30),
    reach=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_what_is_read_is_in_the_sentence_and_has_all_within_reach(centre: float, length: int, reach: int) -> None:
    if length < 2 * reach + 2:
        return
    where = torch.tensor([[centre * length]], dtype=torch.float64)
    positions = LocalMonotonicWindow(reach).positions(where, length).flatten().tolist()
    assert positions == list(range(positions[0], positions[0] + 2 * reach + 2))
    assert positions[0] >= 0
    assert positions[-1] < length
    assert {s for s in range(length) if abs(s - float(where)) <= reach} <= set(positions)


def test_positions_beyond_256_are_read_as_they_are_in_reduced_precision() -> None:
    """bfloat16 cannot represent odd numbers above 256."""
    attention = Attention(LocationScore(4, 400), LocalMonotonicWindow(2), SoftmaxNormalizer())
    states, valid = torch.randn(1, 300, 4), torch.ones(1, 300, dtype=torch.bool)
    query = torch.randn(1, 300, 4)
    with torch.autocast("cpu", torch.bfloat16):
        memory = attention.remember(states, valid)
        weights = attention.sequence(query, memory).weights
        energies = attention.score(query, memory.keys)
    for t in (256, 257, 259):
        window = slice(t - 2, t + 3)
        torch.testing.assert_close(weights[0, t, window], energies[0, t, window].float().softmax(-1))
