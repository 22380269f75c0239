"""Normalizers in cases that test_combinations lacks: ties, masks, extreme energies, noise, edges of gradients.

Shapes: S source positions, T target positions.
"""

import equations
import numpy as np
import pytest
import torch
from combinations import NORMALIZERS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from nmt.attention.normalizers import (
    MonotonicNormalizer,
    Normalizer,
    SoftmaxNormalizer,
    chunk_log_weights,
    constrained_sparsemax,
    monotonic_log_weights,
)
from nmt.attention.scores import Past
from nmt.config.schema import model as schema

KEEP = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True, False, True, True, True, False]])
SOFT = ["softmax", "sparsemax", "entmax15"]


def normalizer_of(kind: str) -> Normalizer:
    attention, *_ = Case(f"dot-global-{kind}").make()
    normalizer = attention.normalizer
    assert isinstance(normalizer, Normalizer)
    return normalizer


def weights_of(normalizer: Normalizer, energies: Tensor, keep: Tensor | None = None) -> Tensor:
    """Compute weights at the first step: energies (T, S) -> (T, S)."""
    keep = torch.ones(energies.shape, dtype=torch.bool) if keep is None else keep
    return normalizer(energies[None], keep[None], Past.initial(keep[:1])).weights[0]


@pytest.mark.parametrize("kind", SOFT)
@given(
    energies=npst.arrays(np.float64, st.integers(1, 12), elements=st.floats(-20, 20, width=16)),
    dropped=st.sets(st.integers(0, 11)),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_equals_the_equation_over_what_is_kept(kind: str, energies: equations.Array, dropped: set[int]) -> None:
    """Tests also energies with ties."""
    keep = np.array([s not in dropped for s in range(len(energies))])
    if not keep.any():
        return
    config: schema.Normalizer = Case(f"dot-global-{kind}").config.normalizer
    expected = np.zeros(len(energies))
    expected[keep] = equations.normalized(config, {}, energies[keep], np.zeros(0), 0, False)
    found = weights_of(normalizer_of(kind), torch.tensor(energies)[None], torch.tensor(keep)[None])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-10)


def test_a_small_temperature_does_not_overflow() -> None:
    halves = torch.tensor([[7.0, 8.0]], dtype=torch.float16)  # 8 / 1e-4 = 80,000 overflows float16
    assert weights_of(SoftmaxNormalizer(1e-4), halves)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("kind", NORMALIZERS)
def test_extreme_energies_give_finite_weights_and_gradients(kind: str, scale: float, training: bool) -> None:
    """Tests in float32 a later step, before which all weight was on the second position."""
    normalizer = normalizer_of(kind).float().train(training)
    energies = (torch.randn(20, 1, 6) * scale).requires_grad_()
    keep = torch.arange(6) < torch.arange(20)[:, None, None] % 7  # some rows keep no position
    second = torch.eye(6)[1].expand(20, 1, 6)
    past = Past.initial(keep[:, 0]).after(second, second.log())
    weights = normalizer(energies, keep, past).weights
    assert weights.isfinite().all()
    assert not weights[~keep].any()
    loss = weights.square().sum()
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, [energies])
        assert gradient.isfinite().all()
        assert not gradient[~keep].any()


def test_noise_of_the_stated_deviation_moves_energies_in_training_alone() -> None:
    """At the first step the first weight is sigmoid(energy + noise), so its logit reveals the noise. With 40,000 draws,
    4.5 standard errors are 0.045 for the mean and 0.032 for the deviation of 2."""
    energies, keep = torch.full((40_000, 1, 3), 0.5).double(), torch.ones(40_000, 1, 3, dtype=torch.bool)
    past = Past.initial(keep[:, 0])
    normalizer = MonotonicNormalizer(2.0, 0.0).double().train()
    noise = normalizer(energies, keep, past).weights[:, 0, 0].detach().logit() - 0.5
    assert noise.mean().item() == pytest.approx(0.0, abs=0.045)
    assert noise.std().item() == pytest.approx(2.0, abs=0.032)
    normalizer.eval()
    one, other = (
        each(energies, keep, past).weights for each in (normalizer, MonotonicNormalizer(0.0, 0.0).double().eval())
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("energy", [-60.0, 60.0])
def test_nothing_underflows(energy: float) -> None:
    """Stop probabilities are near 0 or 1: with energy 60, the last weight is about 1e-1016."""
    energies = torch.full((1, 40), energy, requires_grad=True)
    first = torch.full((1, 40), -torch.inf)
    first[0, 0] = 0.0
    keep = torch.ones(1, 40, dtype=torch.bool)
    log_weights = monotonic_log_weights(energies, keep, first)
    p, q = torch.sigmoid(torch.tensor(energy).double()), torch.sigmoid(torch.tensor(-energy).double())
    expected = p.log() + q.log() * torch.arange(40)
    torch.testing.assert_close(log_weights[0].double(), expected, rtol=1e-5, atol=1e-20)
    (gradient,) = torch.autograd.grad(log_weights[0, -1], energies)
    torch.testing.assert_close(gradient[0, -1], q.float())
    torch.testing.assert_close(gradient[0, :-1], torch.full((39,), -float(p)))


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_gradients_of_chunks(chunk: int) -> None:
    """Tests also positions in no chunk, and a row without any stop."""
    energies = torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True)
    stops = torch.randn(KEEP.shape, dtype=torch.float64, requires_grad=True)
    nowhere = ~KEEP | (torch.arange(6) < 2) | (torch.arange(3) == 1)[:, None]

    def log_weights(stops: Tensor, energies: Tensor) -> Tensor:
        found = chunk_log_weights(stops.masked_fill(nowhere, -torch.inf), energies, KEEP, chunk)
        return found.masked_fill(found == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(log_weights, (stops, energies))
    assert not log_weights(stops, energies)[1].any()


@given(
    energies=npst.arrays(np.float64, st.integers(1, 7), elements=st.floats(-3, 3, width=16)),
    bounds=npst.arrays(np.float64, 7, elements=st.floats(0, 1, width=16)),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_constrained_sparsemax_equals_its_equation(energies: equations.Array, bounds: equations.Array) -> None:
    """Tests also ties and exhausted positions. The last position has no bound."""
    bounds = np.append(bounds[: len(energies) - 1], np.inf)
    found = constrained_sparsemax(torch.tensor(energies)[None], torch.tensor(bounds)[None])[0]
    np.testing.assert_allclose(found, equations.constrained(energies, bounds), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("energy", "spread"), [(-1e4, 100.0), (0.0, 100.0), (1e4, 100.0), (0.0, 1e5), (0.0, 1e7)])
def test_rows_sum_to_one_in_float32_however_far_apart_the_energies(energy: float, spread: float) -> None:
    """The last position receives the remaining weight, even if all other positions are exhausted."""
    energies = torch.randn(64, 60) * spread
    energies[:, -1] = energy
    bounds = torch.rand(64, 60) * (torch.arange(64) % 4)[:, None] / 60
    bounds[:, -1] = torch.inf
    weights = constrained_sparsemax(energies, bounds)
    torch.testing.assert_close(weights.sum(-1), torch.ones(64), rtol=0, atol=2e-6 if spread < 1e5 else 1e-4)
    assert (weights <= bounds).all()
    assert torch.equal(weights[::4], torch.eye(60)[-1].expand(16, -1))
