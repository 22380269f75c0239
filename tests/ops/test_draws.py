"""Random numbers: dropout from the bits of large random integers, and numbers per sentence.

Numbers per sentence are uniform and independent, and do not depend on the sentence's place in a batch.
"""

import numpy as np
import pytest
import torch

from nmt.ops.draws import (
    BLOCK,
    Dropout,
    SentenceDraws,
    copied_draws,
    draw,
    dropout,
    sampling_draws,
    sentence_draws,
    sentence_keys,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("p", [0.1, 0.35, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_the_share_asked_for_and_divides_by_the_rest(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    n = 400_003  # not a multiple of 4
    dropped = dropout(torch.ones(n, dtype=dtype), p, training=True)
    assert dropped.dtype == dtype
    zeros = int((dropped == 0).sum())
    assert abs(zeros - p * n) < 5 * (n * p * (1 - p)) ** 0.5
    torch.testing.assert_close(dropped[dropped != 0].unique(), torch.tensor([1 / (1 - p)]).to(dtype))


def test_neighbours_are_independent() -> None:
    """This includes neighbours from the bits of one random number."""
    torch.manual_seed(1)
    zero = (dropout(torch.ones(100_000, 4), 0.5, training=True) == 0).double()
    correlation = torch.corrcoef(zero.T) - torch.eye(4)
    assert correlation.abs().max() < 0.02


def test_does_nothing_in_evaluation_or_at_zero_and_everything_at_one() -> None:
    inputs = torch.ones(3, 5)
    assert Dropout(0.5).eval()(inputs) is inputs
    assert Dropout(0.0)(inputs) is inputs
    assert not Dropout(1.0)(inputs).any()


def draws(*numbers: int, seed: tuple[int, ...] = (1, 1)) -> SentenceDraws:
    return SentenceDraws(lambda: sentence_keys(seed, np.array(numbers)))


def test_a_sentence_has_its_numbers_in_any_batch() -> None:
    both = draws(5, 9)(2, 4, CPU)
    torch.testing.assert_close(draws(9)(1, 4, CPU)[0], both[1], rtol=0, atol=0)
    assert not torch.equal(both[0], both[1])
    for other in (draws(5, seed=(1, 2)), draws(5, seed=(2, 1))):
        assert not torch.equal(other(1, 4, CPU)[0], both[0])


def test_numbers_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    count = 2 * BLOCK + 7
    at_once = draws(3, 4)(2, count, CPU)
    one_by_one = draws(3, 4)
    steps = torch.cat([one_by_one(2, n, CPU) for n in (1, 2, BLOCK + 5, count - BLOCK - 8)], dim=1)
    torch.testing.assert_close(steps, at_once, rtol=0, atol=0)


def test_heads_have_numbers_of_their_own() -> None:
    heads = draws(3, 4)(6, 5, CPU)
    assert len({tuple(row) for row in heads.tolist()}) == 6
    torch.testing.assert_close(draws(4)(3, 5, CPU), heads[3:], rtol=0, atol=0)


def test_the_numbers_are_uniform_and_independent() -> None:
    numbers = draws(*range(400))(400, 250, CPU)
    assert 0 <= float(numbers.min()) < 1e-3
    assert 0.999 < float(numbers.max()) < 1
    counts = torch.histc(numbers, 50, 0, 1)
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert 20 < chi_square < 85  # chi-square with 49 degrees of freedom
    correlation = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.015
    across = torch.corrcoef(torch.stack([numbers[:-1].flatten(), numbers[1:].flatten()]))[0, 1]
    assert abs(float(across)) < 0.015


def test_the_context_says_whose_numbers_are_drawn() -> None:
    torch.manual_seed(1)
    outside = draw(2, 3, CPU)
    torch.manual_seed(1)
    torch.testing.assert_close(draw(2, 3, CPU), outside, rtol=0, atol=0)
    with sentence_draws(draws(5, 9)):
        inside = draw(2, 3, CPU)
        with copied_draws(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1])):
            copies = draw(3, 3, CPU)
        following = draw(2, 3, CPU)
    expected = draws(5, 9)(2, 6, CPU)
    torch.testing.assert_close(torch.cat([inside, following], dim=1), expected, rtol=0, atol=0)
    assert len({tuple(row) for row in [*copies.tolist(), *inside.tolist()]}) == 5
    with sentence_draws(draws(9)), copied_draws(torch.tensor([0]), torch.tensor([0])):
        torch.testing.assert_close(draw(1, 3, CPU)[0], copies[1], rtol=0, atol=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_have_numbers_of_their_own(samples: int) -> None:
    keys = sentence_keys((1,), np.array([5, 9]))
    uniform = sampling_draws(keys, samples, CPU)
    first, second = uniform(torch.arange(2 * samples)), uniform(torch.tensor([2 * samples - 1]))
    assert len(set(first.tolist())) == 2 * samples
    assert float(second) not in first.tolist()
    alone = sampling_draws(keys[1:], samples, CPU)
    torch.testing.assert_close(alone(torch.arange(samples)), first[samples:], rtol=0, atol=0)
    positions = SentenceDraws(lambda: keys)(2, 4, CPU)
    assert not set(first.tolist()) & set(positions.flatten().tolist())
