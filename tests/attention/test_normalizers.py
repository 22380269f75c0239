"""From energies to weights: equations, closed forms, masks and precision."""

import equations
import numpy as np
import pytest
import torch
from combinations import NORMALIZERS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.normalizers import Normalizer, SoftmaxNormalizer
from nmt.config.schema import model as schema

SOFT = ["softmax", "sparsemax", "entmax15"]


def normalizer_of(kind: str) -> Normalizer:
    attention, *_ = Case(f"dot-global-{kind}").make()
    normalizer = attention.normalizer
    assert isinstance(normalizer, Normalizer)
    return normalizer


def weights_of(normalizer: Normalizer, energies: Tensor, keep: Tensor | None = None) -> Tensor:
    """(T, S) -> (T, S), at the first step."""
    keep = torch.ones(energies.shape, dtype=torch.bool) if keep is None else keep
    return normalizer(energies[None], keep[None], Past.start(keep[:1])).weights[0]


@pytest.mark.parametrize("kind", SOFT)
@given(
    energies=npst.arrays(np.float64, st.integers(1, 12), elements=st.floats(-20, 20, width=16)),
    dropped=st.sets(st.integers(0, 11)),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_equals_the_equation_over_what_is_kept(kind: str, energies: equations.Array, dropped: set[int]) -> None:
    """With ties, too."""
    keep = np.array([s not in dropped for s in range(len(energies))])
    if not keep.any():
        return
    config: schema.Normalizer = Case(f"dot-global-{kind}").config.normalizer
    expected = np.zeros(len(energies))
    expected[keep] = equations.normalized(config, {}, energies[keep], np.zeros(0), 0, False)
    found = weights_of(normalizer_of(kind), torch.tensor(energies)[None], torch.tensor(keep)[None])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-10)


def test_two_positions_have_closed_forms() -> None:
    """Of their difference: softmax a logistic curve; sparsemax a line, cut off (Martins and Astudillo 2016, 2.2);
    1.5-entmax ((d + sqrt(2 - d^2)) / 2)^2 of half the difference d between -1 and 1."""
    difference = torch.linspace(-4, 4, 81).double()
    energies = torch.stack([difference, torch.zeros(81).double()], dim=1)
    d = (difference / 2).clamp(-1, 1)
    found = {kind: weights_of(normalizer_of(kind), energies)[:, 0] for kind in SOFT}
    torch.testing.assert_close(found["softmax"], torch.sigmoid(difference / 0.7))
    torch.testing.assert_close(found["sparsemax"], ((difference + 1) / 2).clamp(0, 1))
    torch.testing.assert_close(found["entmax15"], ((d + (2 - d.square()).sqrt()) / 2).square())


def test_zeros_are_ever_more_from_softmax_to_sparsemax() -> None:
    energies = torch.randn(50, 10)
    softmax, sparsemax, entmax = ((weights_of(normalizer_of(kind), energies) > 0).sum(-1) for kind in SOFT)
    assert (softmax == 10).all()
    assert (entmax < 10).any()
    assert (sparsemax <= entmax).all()
    assert (sparsemax < entmax).any()


@pytest.mark.parametrize("kind", SOFT)
def test_a_constant_added_to_all_energies_changes_nothing(kind: str) -> None:
    energies = torch.randn(5, 6).double()
    shifted = weights_of(normalizer_of(kind), energies + 100)
    torch.testing.assert_close(shifted, weights_of(normalizer_of(kind), energies), rtol=0, atol=1e-12)


def test_temperature_sharpens_and_flattens() -> None:
    energies = torch.tensor([[1.0, 2.0, 3.0]])
    cold, plain, hot = (weights_of(SoftmaxNormalizer(temperature), energies).max() for temperature in (0.1, 1.0, 10.0))
    assert cold > plain > hot
    torch.testing.assert_close(weights_of(SoftmaxNormalizer(0.5), energies), torch.softmax(energies * 2, -1))
    halves = torch.tensor([[7.0, 8.0]], dtype=torch.float16)  # 80,000 is more than they hold
    assert weights_of(SoftmaxNormalizer(1e-4), halves)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", NORMALIZERS)
def test_weights_are_float32_or_wider(kind: str, dtype: torch.dtype, training: bool) -> None:
    normalizer = normalizer_of(kind).float().train(training)
    keep = torch.tensor([[[True, True, True, False]]])
    found = normalizer(torch.randn(1, 1, 4).to(dtype), keep, Past.start(keep[:, 0]))
    for part in found:
        assert part is None or part.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("kind", NORMALIZERS)
def test_extreme_energies_give_finite_weights_and_gradients(kind: str, scale: float, training: bool) -> None:
    """In float32, at later steps too, the whole weight on the second position before."""
    normalizer = normalizer_of(kind).float().train(training)
    energies = (torch.randn(20, 1, 6) * scale).requires_grad_()
    keep = torch.arange(6) < torch.arange(20)[:, None, None] % 7  # some rows without any
    second = torch.eye(6)[1].expand(20, 1, 6)
    past = Past.start(keep[:, 0]).after(second, second.log())
    weights = normalizer(energies, keep, past).weights
    assert weights.isfinite().all()
    assert not weights[~keep].any()
    loss = weights.square().sum()
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, [energies])
        assert gradient.isfinite().all()
        assert not gradient[~keep].any()
