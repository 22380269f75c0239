"""Losses on attention weights, compared with plain loops."""

import math

import pytest
import torch
from combinations import Case, attend

from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import Past
from nmt.training.losses import coverage_loss, guided_alignment_loss

B, T, S = 2, 4, 5


def test_coverage_loss_is_the_overlap_with_what_came_before() -> None:
    weights = torch.rand(B, T, S, dtype=torch.float64).softmax(-1)
    lengths = [4, 2]
    real = torch.arange(T) < torch.tensor(lengths)[:, None]
    expected = 0.0
    for b in range(B):
        covered = [0.0] * S
        for t in range(lengths[b]):
            for s in range(S):
                weight = float(weights[b, t, s])
                expected += min(weight, covered[s])
                covered[s] += weight
    torch.testing.assert_close(float(coverage_loss(weights, real)), expected, rtol=1e-12, atol=0)


def test_guided_alignment_is_the_cross_entropy_of_given_rows() -> None:
    log_weights = torch.rand(B, T, S, dtype=torch.float64).log_softmax(-1)
    given = torch.zeros(B, T, S, dtype=torch.float64)
    given[0, 1, 2], given[1, 0, :2] = 1.0, 0.5
    expected = -log_weights[0, 1, 2] - 0.5 * log_weights[1, 0, :2].sum()
    torch.testing.assert_close(guided_alignment_loss(log_weights, given), expected)


def test_guided_alignment_passes_over_what_a_window_excludes() -> None:
    log_weights = torch.tensor([[[0.0, -torch.inf]]], requires_grad=True)
    loss = guided_alignment_loss(log_weights, torch.tensor([[[0.0, 1.0]]]))
    loss.backward()
    assert loss == 0
    assert log_weights.grad is not None
    assert not log_weights.grad.any()


@pytest.mark.parametrize("gap", [1.0, 60.0, 95.0, 110.0, 1e4])
def test_guided_alignment_has_the_exact_gradient_however_small_the_weight(gap: float) -> None:
    """The gradient is p - reference, also if the weight is subnormal in float32 (gap 95) or zero (gap 110)."""
    normalizer, keep = SoftmaxNormalizer(), torch.ones(1, 1, 3, dtype=torch.bool)
    normalizer.with_log_weights = True
    energies = torch.tensor([[[gap + 1, 0.0, gap]]], requires_grad=True)
    log_weights = normalizer(energies, keep, Past.start(keep[:, 0])).log_weights
    loss = guided_alignment_loss(log_weights, torch.tensor([[[0.0, 1.0, 0.0]]]))
    (gradient,) = torch.autograd.grad(loss, energies)
    expected = energies[0, 0].detach().double().softmax(-1) - torch.tensor([0.0, 1.0, 0.0]).double()
    torch.testing.assert_close(gradient[0, 0].double(), expected, rtol=1e-6, atol=1e-6)
    assert float(loss.detach()) == pytest.approx(gap + 1 + math.log1p(math.exp(-1) + math.exp(-gap - 1)))


GUIDED = ["additive-global-softmax", "additive-local_m-softmax", "general-local_p-softmax", "dot-global-monotonic"]


@pytest.mark.parametrize("name", [*GUIDED, *(f"{name}-heads" for name in GUIDED)])
@pytest.mark.parametrize("length", [5, 12])  # windows are masked in short sentences, gathered by position in long ones
def test_log_weights_are_the_logarithm_of_the_weights(name: str, length: int) -> None:
    attention, query, states, valid = Case(name, lengths=(length, 2, 4), training=True).make()
    for module in attention.modules():
        if isinstance(module, SoftmaxNormalizer):
            module.with_log_weights = True
    attended = attend(attention, query, states, valid)
    assert attended.log_weights is not None
    torch.testing.assert_close(attended.log_weights, attended.weights.log())
    assert torch.equal(attended.log_weights == -torch.inf, attended.weights == 0)
