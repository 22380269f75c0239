"""Losses on attention weights, against plain loops."""

import torch

from nmt.attention.losses import coverage_loss, guided_alignment_loss

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


def test_attending_to_something_new_costs_nothing() -> None:
    real = torch.ones(1, 3, dtype=torch.bool)
    assert coverage_loss(torch.eye(3)[None], real) == 0
    assert coverage_loss(torch.eye(3)[[0, 0, 0]][None], real) == 2


def test_guided_alignment_is_the_cross_entropy_of_given_rows() -> None:
    weights = torch.rand(B, T, S, dtype=torch.float64).softmax(-1)
    given = torch.zeros(B, T, S, dtype=torch.float64)
    given[0, 1, 2], given[1, 0, :2] = 1.0, 0.5
    expected = -weights[0, 1, 2].log() - 0.5 * weights[1, 0, :2].log().sum()
    torch.testing.assert_close(guided_alignment_loss(weights, given), expected)


def test_guided_alignment_passes_over_what_a_window_excludes() -> None:
    weights = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    loss = guided_alignment_loss(weights, torch.tensor([[[0.0, 1.0]]]))
    loss.backward()
    assert loss == 0
    assert weights.grad is not None
    assert weights.grad.isfinite().all()


def test_guided_alignment_pulls_hardest_where_the_weight_is_smallest() -> None:
    energies = torch.tensor([[[60.0, 0.0]]], requires_grad=True)
    guided_alignment_loss(energies.softmax(-1), torch.tensor([[[0.0, 1.0]]])).backward()
    assert energies.grad is not None
    torch.testing.assert_close(energies.grad, torch.tensor([[[1.0, -1.0]]]))
