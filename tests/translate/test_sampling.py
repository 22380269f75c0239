"""Greedy search and sampling compared with the distributions of a toy model; prefixes in every search method."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from search_toy import BOS, EOS, PAD, Toy, allowed, batch_of, bits, search

from nmt.translate.sampling import inverse_cdf
from nmt.translate.search import Hypothesis, Limits

SEARCHES = ["greedy", "sampling", "beam"]


def greedy(toy: Toy, limits: Limits, sentences: list[int] | None = None) -> list[Hypothesis]:
    return [hypothesis for (hypothesis,) in search("greedy", batch_of(toy, limits, sentences))]


def draw(toy: Toy, limits: Limits, n: int = 4000, seed: int = 0, **changes: float) -> list[list[Hypothesis]]:
    return search("sampling", batch_of(toy, limits, seed=seed), n, **changes)


@pytest.mark.parametrize("min_length", [0, 3])
def test_greedy_search_takes_the_most_probable_token_allowed(min_length: int) -> None:
    limits = Limits(min_length, [8, 1, 5, 8])
    for seed in range(5):
        toy = Toy(seed, vocabulary=9, bias={PAD: 9.0, BOS: 9.0})
        for sentence, h in enumerate(greedy(toy, limits)):
            for t, token in enumerate(h.tokens):
                following = toy.next_log_probs(sentence, h.tokens[:t])
                assert token == max(allowed(t + 1, limits, sentence, 9), key=lambda other: following[other])


@pytest.mark.parametrize("kind", ["greedy", "sampling"])
def test_batch_mates_and_their_order_change_nothing(kind: str) -> None:
    toy, maxima = Toy(6, vocabulary=30), [9, 3, 6, 9]
    n = 4 if kind == "sampling" else 1
    together = bits(search(kind, batch_of(toy, Limits(0, maxima)), n))
    for s, maximum in enumerate(maxima):
        assert bits(search(kind, batch_of(toy, Limits(0, [maximum]), [s]), n)) == [together[s]]
    assert bits(search(kind, batch_of(toy, Limits(0, maxima[::-1]), [3, 2, 1, 0]), n)) == together[::-1]
    assert search(kind, batch_of(toy, Limits(0, [])), n) == []


@pytest.mark.parametrize("kind", SEARCHES)
def test_hypotheses_have_the_scores_and_the_attention_of_their_tokens(kind: str) -> None:
    """Scores of samples do not depend on temperature and truncation. Tests also sentences with a prefix."""
    toy, limits, sampled = Toy(6, vocabulary=12), Limits(1, [6, 3, 7], [[], [5], [6, 6]]), kind == "sampling"
    changes = {"temperature": 3.0, "top_k": 5, "top_p": 0.9} if sampled else {}
    for sentence, hypotheses in enumerate(search(kind, batch_of(toy, limits), 6 if sampled else 1, **changes)):
        assert len(hypotheses) == (6 if sampled else 1)
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)
        for h in hypotheses:
            expected = [toy.next_log_probs(sentence, h.tokens[:t])[token] for t, token in enumerate(h.tokens)]
            assert h.token_log_probs == pytest.approx(expected, abs=1e-5)
            assert h.score == h.log_prob == pytest.approx(sum(expected), abs=1e-5)
            assert h.attention is not None
            assert torch.equal(h.attention, toy.attention(sentence, h.tokens))
    assert search(kind, batch_of(Toy(0, attends=False), Limits(0, [5])))[0][0].attention is None


@pytest.mark.parametrize("kind", SEARCHES)
def test_hypotheses_start_with_their_prefixes(kind: str) -> None:
    """A prefix may contain tokens that are never generated. It may be as long as the maximum length."""
    prefixes = [[5], [7, PAD, BOS, 4], [], [3, 3, 3]]
    limits = Limits(6, [9, 5, 8, 4], prefixes)
    for seed in range(3):
        results = search(kind, batch_of(Toy(seed, vocabulary=9), limits))
        for (hypothesis, *_), prefix, most in zip(results, prefixes, limits.max_lengths, strict=True):
            assert hypothesis.tokens[: len(prefix)] == prefix
            assert len(hypothesis.tokens) == most or len(hypothesis.tokens) > 6
        assert results[3][0].tokens == [3, 3, 3, EOS]


def first_token_probs(toy: Toy, temperature: float = 1.0) -> dict[int, float]:
    """Compute the probabilities of the allowed first tokens, most probable first."""
    following = toy.next_log_probs(0, [])
    weights = {token: math.exp(following[token] / temperature) for token in range(EOS, toy.vocabulary)}
    total = sum(weights.values())
    return {token: weights[token] / total for token in sorted(weights, key=lambda token: -weights[token])}


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, 40), (1.0, 0), (2.0, 40)])
def test_draws_fit_the_probabilities_by_chi_square(temperature: float, top_k: int) -> None:
    toy = Toy(11, vocabulary=60, bias={PAD: 4.0, BOS: 4.0})
    expected = dict(list(first_token_probs(toy, temperature).items())[: top_k or None])
    (hypotheses,) = draw(toy, Limits(0, [2]), 10_000, temperature=temperature, top_k=top_k)
    counts = Counter(h.tokens[0] for h in hypotheses)
    assert counts.keys() <= expected.keys()
    likely = {token: 10_000 * prob / sum(expected.values()) for token, prob in expected.items()}
    likely = {token: count for token, count in likely.items() if count >= 5}
    chi_square = sum((counts[token] - count) ** 2 / count for token, count in likely.items())
    # Chi-square of n counts has about the mean n and the variance 2 n.
    assert abs(chi_square - len(likely)) < 3 * math.sqrt(2 * len(likely))


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [({"top_k": 1}, 2.0), ({"top_k": 3}, 1.0), ({"top_k": 100}, 1.0), ({"top_p": 1e-6}, 1.0), ({"top_p": 0.5}, 2.0)],
)
def test_truncation_leaves_the_most_probable_tokens(changes: dict[str, float], temperature: float) -> None:
    """The tokens left are the k most probable, or the smallest set whose probability reaches top_p."""
    toy, left = Toy(3, vocabulary=8), dict[int, float]()
    for token, prob in first_token_probs(toy, temperature).items():
        if len(left) < changes.get("top_k", 100) and sum(left.values()) < changes.get("top_p", 1):
            left[token] = prob
    (hypotheses,) = draw(toy, Limits(0, [2]), temperature=temperature, **changes)
    counts = Counter(h.tokens[0] for h in hypotheses)
    assert counts.keys() <= left.keys()
    for token, prob in left.items():
        assert abs(counts[token] / len(hypotheses) - prob / sum(left.values())) < 0.03


@pytest.mark.parametrize(("changes", "temperature"), [({}, 1e-60), ({"top_k": 3}, 1e-6), ({"top_p": 0.9}, 1e-60)])
def test_a_small_temperature_is_greedy_search(changes: dict[str, Any], temperature: float) -> None:
    toy, limits = Toy(4, vocabulary=20), Limits(1, [8, 3, 8])
    drawn = draw(toy, limits, 5, temperature=temperature, **changes)
    for best, hypotheses in zip(greedy(toy, limits), drawn, strict=True):
        assert [h.tokens for h in hypotheses] == [best.tokens] * 5


def test_a_rare_token_has_its_share_of_the_unit_interval() -> None:
    """The share is 1e-7, after 6,000 other tokens; near 1, a cumulative sum in float32 has steps of 6e-8."""
    log_probs = torch.full((1, 6001), math.log((1 - 1e-7) / 6000))
    log_probs[0, -1] = math.log(1e-7)
    points = 1 - 1e-9 * torch.arange(1, 201, dtype=torch.float64)
    drawn = inverse_cdf(log_probs.expand(200, -1), 1.0, points)
    assert (drawn == 6000).sum().item() == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("uniform", "total"),
    [(0.0, 1.0), (0.5, 0.3), (math.nextafter(1.0, 0.0), 3.0), (math.nextafter(1.0, 0.0), 1 + 1e-7)],
)
def test_an_impossible_token_is_never_drawn(uniform: float, total: float) -> None:
    probs = torch.tensor([[0.0, 0.0, total / 3, 0.0, 2 * total / 3, 0.0, 0.0]])
    (drawn,) = inverse_cdf(probs.log(), 1.0, torch.tensor([uniform], dtype=torch.float64)).tolist()
    assert drawn == (2 if uniform == 0.0 else 4)
