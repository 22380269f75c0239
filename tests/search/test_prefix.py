"""Hypotheses that start with given tokens, in every search, and what each token contributes."""

import pytest
import torch
from search_toy import BOS, CPU, EOS, NO_PENALTY, PAD, SYMBOLS, Toy, enumerate_all
from torch import Tensor

from nmt.translate.search.beam import beam_search
from nmt.translate.search.hypothesis import Hypothesis, Limits
from nmt.translate.search.rollout import SamplingOptions, greedy_search, sample

SEARCHES = ["greedy", "sampling", "beam"]


def search(kind: str, toy: Toy, limits: Limits, sentences: list[int], n: int = 1, beam: int = 3) -> list[Hypothesis]:
    inputs = toy.step, toy.start(sentences), SYMBOLS, limits
    draws = torch.Generator().manual_seed(1)

    def uniform(rows: Tensor) -> Tensor:
        return torch.rand(len(rows), generator=draws, dtype=torch.float64)

    if kind == "greedy":
        found = greedy_search(*inputs, penalty=NO_PENALTY, device=CPU)
    elif kind == "beam":
        found = beam_search(*inputs, beam_size=beam, n_best=n, penalty=NO_PENALTY, device=CPU)
    else:
        options = SamplingOptions(1.0, 0, 1.0, n)
        found = sample(*inputs, options=options, uniform=uniform, penalty=NO_PENALTY, device=CPU)
    return [hypothesis for nbest in found for hypothesis in nbest]


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("seed", range(3))
def test_hypotheses_start_with_their_prefixes(kind: str, seed: int) -> None:
    """Also with tokens that are never generated, below the minimum length and up to the maximum."""
    toy = Toy(seed, vocabulary=9)
    prefixes = [[5], [7, PAD, BOS, 4], [], [3, 3, 3]]
    limits = Limits(6, [9, 5, 8, 4], prefixes)
    found = search(kind, toy, limits, [0, 1, 2, 3])
    for sentence, (hypothesis, prefix) in enumerate(zip(found, prefixes, strict=True)):
        assert hypothesis.tokens[: len(prefix)] == prefix
        assert hypothesis.log_prob == pytest.approx(toy.log_prob(sentence, hypothesis.tokens), abs=1e-4)
        assert len(hypothesis.tokens) == limits.max_lengths[sentence] or len(hypothesis.tokens) > 6


@pytest.mark.parametrize("kind", SEARCHES)
def test_the_start_of_what_was_found_changes_nothing(kind: str) -> None:
    toy = Toy(4, vocabulary=9)
    for length in (1, 2, 4):
        (free,) = search(kind, toy, Limits(0, [9]), [3], beam=500)
        if kind == "sampling":  # the draws of the prefix's steps are made but not used
            continue
        (again,) = search(kind, toy, Limits(0, [9], [free.tokens[: min(length, len(free.tokens) - 1)]]), [3], beam=500)
        assert again.tokens == free.tokens
        assert again.log_prob == pytest.approx(free.log_prob, abs=1e-5)


def test_a_large_beam_finds_the_best_continuation() -> None:
    toy = Toy(2)
    for prefix in ([3], [4, 3], [5, 5, 5]):
        limits = Limits(0, [6], [prefix])
        (found,) = search("beam", toy, limits, [0], beam=4**6)
        fitting = [pair for pair in enumerate_all(toy, Limits(0, [6]), 0) if pair[0][: len(prefix)] == prefix]
        best, log_prob = max(fitting, key=lambda pair: pair[1])
        assert found.tokens == best
        assert found.log_prob == pytest.approx(log_prob, abs=1e-5)


@pytest.mark.parametrize("kind", SEARCHES)
def test_every_token_has_its_log_probability(kind: str) -> None:
    toy = Toy(6, vocabulary=9)
    found = search(kind, toy, Limits(1, [9, 3, 7], [[], [5], [6, 6]]), [0, 1, 2])
    for sentence, hypothesis in enumerate(found):
        expected = [
            toy.next_log_probs(sentence, hypothesis.tokens[:t])[token] for t, token in enumerate(hypothesis.tokens)
        ]
        assert hypothesis.token_log_probs == pytest.approx(expected, abs=1e-5)


def test_a_prefix_must_leave_room_for_the_end() -> None:
    with pytest.raises(ValueError, match="above the lengths of the prefixes"):
        Limits(0, [3, 3], [[], [4, 4, 4]])
    (found,) = search("greedy", Toy(1), Limits(0, [4], [[4, 4, 4]]), [0])
    assert found.tokens == [4, 4, 4, EOS]
