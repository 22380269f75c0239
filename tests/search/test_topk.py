import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nmt.translate.search import log_probs
from nmt.translate.search.log_probs import BLOCK, pack_top, unpack


@pytest.mark.parametrize("granularity", [0.0, 0.5, 3.0])  # the coarser, the more values are equal
@given(in_blocks=st.booleans(), blocks=st.integers(1, 20), k=st.integers(1, BLOCK), seed=st.integers(0, 10**6))
def test_is_a_stable_sort_cut_off(granularity: float, in_blocks: bool, blocks: int, k: int, seed: int) -> None:
    values = -4 * torch.rand(3, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    if granularity:
        values = (values / granularity).round() * granularity  # holds 0 and -0 too
    values[:, seed % 7 :: 5] = -math.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    with patch.object(log_probs, "FEW", 0 if in_blocks else len(values.flatten())):
        found, positions = unpack(pack_top(values, k).numpy())
    assert (found == expected.values[:, :k].numpy()).all()
    assert (positions == expected.indices[:, :k].numpy()).all()
