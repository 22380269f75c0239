"""From energies to weights, beyond the laws of test_combinations: ties, masks, precision; budgets; the hard process of
which monotonic attention is the mean.

Shapes: B batch, S source positions, T target positions.
"""

import itertools

import equations
import numpy as np
import pytest
import torch
from combinations import NORMALIZERS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from nmt.attention.normalizers import Chunk, FertilityNormalizer, MonotonicNormalizer, Normalizer, SoftmaxNormalizer
from nmt.attention.scores import DotScore, Past
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
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
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


KEEP = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
LAST = [4, 2]


def fertile_steps(fertility: float, energies: Tensor) -> Tensor:
    """(B, T, S) -> weights (B, T, S), each step's past being the steps before it."""
    normalizer, past, rows = FertilityNormalizer(fertility), Past.start(KEEP), []
    for step in energies.unbind(1):
        rows.append(normalizer(step[:, None], KEEP[:, None], past).weights)
        past = past.after(rows[-1], None)
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize("fertility", [0.3, 1.0, 2.5])
def test_no_word_exceeds_its_budget_and_the_last_position_has_none(fertility: float) -> None:
    energies = torch.randn(2, 30, 5).double()
    weights = fertile_steps(fertility, energies)
    totals = weights.sum(1)
    for b, last in enumerate(LAST):
        assert (totals[b, :last] <= fertility + 1e-12).all()
        assert totals[b, last] > 30 - last * fertility - 1e-9
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 30).double(), rtol=0, atol=1e-12)


B, T, S = 2, 3, 3


def all_steps(normalizer: MonotonicNormalizer, energies: Tensor, keep: Tensor | None = None) -> Tensor:
    """(B, T, S), bool (B, S) -> weights (B, T, S), each step's past being the steps before it."""
    keep = torch.ones(energies.shape[0], energies.shape[2], dtype=torch.bool) if keep is None else keep
    past, rows = Past.start(keep), []
    for step in energies.unbind(1):
        normalized = normalizer(step[:, None], keep[:, None], past)
        rows.append(normalized.weights)
        past = past.after(normalized.weights, normalized.log_weights)
    return torch.cat(rows, dim=1)


def plain(offset: float = 0.0, noise: float = 0.0) -> MonotonicNormalizer:
    normalizer = MonotonicNormalizer(noise, offset).double()
    torch.nn.init.constant_(normalizer.offset, offset)  # not rounded to float32
    return normalizer


def hard_process(taken: tuple[tuple[bool, ...], ...]) -> equations.Array:
    """Whether each step takes each position if it comes there (T, S) -> the weights (T, S)."""
    weights, at = np.zeros((T, S)), 0
    for t, row in enumerate(taken):
        at = next((s for s in range(at, S) if row[s]), S)
        if at < S:
            weights[t, at] = 1.0
    return weights


def test_expected_weights_are_the_mean_of_all_outcomes_of_the_hard_process() -> None:
    energies = torch.randn(B, T, S).double()
    found = all_steps(plain(0.3).train(), energies).detach().numpy()
    for b in range(B):
        p = torch.sigmoid(energies[b] + 0.3).numpy()
        mean, whole = np.zeros((T, S)), 0.0
        for outcome in itertools.product([False, True], repeat=T * S):
            taken = np.array(outcome).reshape(T, S)
            probability = float(np.where(taken, p, 1 - p).prod())
            whole += probability
            mean += probability * hard_process(tuple(map(tuple, taken)))
        assert whole == pytest.approx(1.0)
        np.testing.assert_allclose(found[b], mean, rtol=0, atol=1e-10)


def test_reading_goes_on_from_where_it_stopped_and_the_end_once_passed_stays_passed() -> None:
    energies = torch.tensor([[-1, 1, 1], [1, 1, -1], [1, -1, 1], [1, 1, -1], [1, 1, 1]]).double()
    weights = all_steps(plain().eval(), energies[None])[0]
    assert weights.tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_noise_of_the_stated_deviation_moves_energies_in_training_alone() -> None:
    """At the first step the first weight is sigmoid(energy + noise): its logit tells the noise. N = 40000: the mean
    and the deviation of 2 are known within 4.5 of their own deviations, 0.045 and 0.032."""
    energies = torch.full((40_000, 1, S), 0.5).double()
    normalizer = plain(noise=2.0).train()
    noise = all_steps(normalizer, energies)[:, 0, 0].detach().logit() - 0.5
    assert noise.mean().item() == pytest.approx(0.0, abs=0.045)
    assert noise.std().item() == pytest.approx(2.0, abs=0.032)
    normalizer.eval()
    assert torch.equal(all_steps(normalizer, energies), all_steps(plain().eval(), energies))


def chunked(stops: Tensor, energies: Tensor, size: int) -> Tensor:
    """(B, T, S) probabilities to stop, (B, T, S) -> weights (B, T, S)."""
    keep = torch.ones(len(stops), 1, stops.shape[-1], dtype=torch.bool)
    weights: Tensor = Chunk(DotScore(), size)(stops.log(), energies, keep).weights
    return weights


@pytest.mark.parametrize("size", [1, 2, S, 10])
def test_expected_weights_are_the_mean_of_the_softmaxes_over_the_chunks(size: int) -> None:
    stops, energies = all_steps(plain(0.3).train(), torch.randn(B, T, S).double()), torch.randn(B, T, S).double()
    found = chunked(stops, energies, size)
    ends = torch.eye(S).double().expand(B, S, S)
    by_end = torch.stack([chunked(ends, u[:, None].expand(-1, S, -1), size) for u in energies.unbind(1)], dim=1)
    torch.testing.assert_close(found, torch.einsum("bte,btes->bts", stops, by_end))
    for b in range(B):
        for end in range(S):
            first = max(0, end - size + 1)
            inside = energies[b, 0, first : end + 1].softmax(-1)
            torch.testing.assert_close(by_end[b, 0, end, first : end + 1], inside)
            assert by_end[b, 0, end].sum().item() == pytest.approx(1.0)
