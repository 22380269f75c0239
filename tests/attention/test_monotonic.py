"""Monotonic attention: the expected weights are those of the hard process, step after step.

Shapes: B batch, S source positions, T target positions.
"""

import itertools

import equations
import numpy as np
import pytest
import torch
from torch import Tensor

from nmt.attention.memory import Past
from nmt.attention.normalizers import MonotonicNormalizer

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


@pytest.mark.parametrize("training", [False, True])
def test_certain_choices_are_the_hard_process(training: bool) -> None:
    """Where p is nearly 0 or 1 the expected weights are the hard ones, and gradients stay finite."""
    signs = torch.randint(0, 2, (8, T, S)).double() * 2 - 1
    energies = (signs * 200).requires_grad_()
    weights = all_steps(plain().train(training), energies)
    for b in range(8):
        expected = hard_process(tuple(tuple(row) for row in (signs[b] > 0).tolist()))
        np.testing.assert_allclose(weights[b].detach().numpy(), expected, rtol=0, atol=1e-12)
    if training:
        (gradient,) = torch.autograd.grad(weights.square().sum(), [energies])
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dropped", range(S))
def test_padding_is_passed_without_a_chance_to_stop(dropped: int) -> None:
    """Wherever it is: the weights are those of a sentence without it."""
    keep = torch.arange(S)[None] != dropped
    energies = torch.randn(1, T, S).double()
    normalizer = plain().train()
    weights = all_steps(normalizer, energies, keep)
    assert not weights[:, :, dropped].any()
    torch.testing.assert_close(weights[:, :, keep[0]], all_steps(normalizer, energies[:, :, keep[0]]))


def test_the_offset_is_added_to_all_energies_and_learned() -> None:
    energies = torch.randn(B, T, S).double()
    torch.testing.assert_close(all_steps(plain(-0.5), energies), all_steps(plain(), energies - 0.5))
    normalizer = plain()
    all_steps(normalizer, energies).square().sum().backward()
    assert normalizer.offset.grad


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
