import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from search_toy import BOS, CPU, EOS, PAD, PENALTIES, SYMBOLS, Toy, enumerate_all

from nmt.ops.sentence_draws import sampling_draws, sentence_keys
from nmt.translate.search.hypothesis import Hypothesis, LengthPenalty, Limits
from nmt.translate.search.rollout import SamplingOptions, _inverse_cdf, greedy_search, sample


def draw(
    toy: Toy,
    limits: Limits,
    n_samples: int = 4000,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    penalty: LengthPenalty = PENALTIES[1],
) -> list[list[Hypothesis]]:
    return sample(
        toy.step,
        toy.start(list(range(len(limits.max_lengths)))),
        SYMBOLS,
        limits,
        options=SamplingOptions(temperature, top_k, top_p, n_samples),
        uniform=sampling_draws(sentence_keys([seed], np.arange(len(limits.max_lengths))), n_samples, CPU),
        penalty=penalty,
        device=CPU,
    )


def first_token_frequencies(toy: Toy, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> dict[int, float]:
    (hypotheses,) = draw(toy, Limits(0, [2]), temperature=temperature, top_k=top_k, top_p=top_p)
    counts = Counter(h.tokens[0] for h in hypotheses)
    return {token: count / len(hypotheses) for token, count in counts.items()}


def first_token_probs(toy: Toy, temperature: float = 1.0) -> dict[int, float]:
    """Of the allowed tokens, most probable first."""
    following = toy.next_log_probs(0, [])
    weights = {token: math.exp(following[token] / temperature) for token in range(EOS, toy.vocabulary)}
    total = sum(weights.values())
    return {token: weights[token] / total for token in sorted(weights, key=lambda token: -weights[token])}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 40])
def test_draws_fit_the_probabilities_by_chi_square(temperature: float, top_k: int) -> None:
    toy = Toy(11, vocabulary=60, bias={PAD: 4.0, BOS: 4.0})
    expected = dict(list(first_token_probs(toy, temperature).items())[: top_k or None])
    (hypotheses,) = draw(toy, Limits(0, [2]), 20_000, temperature, top_k)
    counts = Counter(h.tokens[0] for h in hypotheses)
    assert counts.keys() <= expected.keys()
    likely = {token: 20_000 * prob / sum(expected.values()) for token, prob in expected.items()}
    likely = {token: count for token, count in likely.items() if count >= 5}
    chi_square = sum((counts[token] - count) ** 2 / count for token, count in likely.items())
    assert abs(chi_square - len(likely)) < 3 * math.sqrt(2 * len(likely))  # mean and deviation of chi-square


def test_a_rare_token_has_its_share_of_the_unit_interval() -> None:
    """1e-7, though it comes after 6,000 others: a float32 sum moves in steps of 6e-8 there."""
    log_probs = torch.full((1, 6001), math.log((1 - 1e-7) / 6000))
    log_probs[0, -1] = math.log(1e-7)
    points = 1 - 1e-9 * torch.arange(1, 201, dtype=torch.float64)[:, None]
    drawn = _inverse_cdf(log_probs.expand(200, -1), 1.0, points)
    assert (drawn == 6000).sum().item() == pytest.approx(100, abs=1)


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("total", [1.0, 0.3, 3.0, 1 + 1e-7])
def test_an_impossible_token_is_never_drawn(uniform: float, total: float) -> None:
    probs = torch.tensor([[0.0, 0.0, total / 3, 0.0, 2 * total / 3, 0.0, 0.0]])
    (drawn,) = _inverse_cdf(probs.log(), 1.0, torch.tensor([[uniform]], dtype=torch.float64)).tolist()
    assert drawn == (2 if uniform == 0.0 else 4)


def test_a_model_without_probabilities_draws_no_padding() -> None:
    """Columns from the vocabulary's size on are padding, which no model could embed."""
    drawn = draw(Toy(0, bias={EOS: math.nan}), Limits(0, [3]), 5)
    assert {token for hypothesis in drawn[0] for token in hypothesis.tokens} <= set(range(6))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    toy = Toy(0)
    expected = first_token_probs(toy, temperature)
    found = first_token_frequencies(toy, temperature=temperature)
    assert all(abs(found.get(token, 0) - prob) < 0.03 for token, prob in expected.items())


def test_frequencies_of_whole_hypotheses() -> None:
    toy = Toy(1, bias={PAD: -math.inf, BOS: -math.inf})
    limits = Limits(0, [3, 3])
    for sentence, hypotheses in enumerate(draw(toy, limits)):
        counts = Counter(tuple(h.tokens) for h in hypotheses)
        for tokens, _ in enumerate_all(toy, limits, sentence):
            # The last eos is forced, and so is drawn with certainty.
            log_prob = toy.log_prob(sentence, tokens[:2])
            assert abs(counts[tuple(tokens)] / len(hypotheses) - math.exp(log_prob)) < 0.03


@pytest.mark.parametrize("top_k", [1, 2, 3, 100])
def test_top_k_keeps_the_most_probable(top_k: int) -> None:
    toy = Toy(2, bias={EOS: 1.0})
    kept = dict(list(first_token_probs(toy).items())[:top_k])
    found = first_token_frequencies(toy, top_k=top_k)
    assert set(found) <= set(kept)
    for token, prob in kept.items():
        assert abs(found.get(token, 0) - prob / sum(kept.values())) < 0.03


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, temperature: float) -> None:
    toy = Toy(3, vocabulary=8)
    kept: dict[int, float] = {}
    for token, prob in first_token_probs(toy, temperature).items():
        if sum(kept.values()) < top_p:
            kept[token] = prob
    found = first_token_frequencies(toy, top_p=top_p, temperature=temperature)
    assert set(found) <= set(kept)
    for token, prob in kept.items():
        assert abs(found.get(token, 0) - prob / sum(kept.values())) < 0.03


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-6, 1e-60])
def test_a_small_temperature_is_greedy_search(options: dict[str, Any], temperature: float) -> None:
    toy = Toy(4, vocabulary=20)
    limits = Limits(1, [8, 3, 8])
    state = toy.start([0, 1, 2])
    greedy = greedy_search(toy.step, state, SYMBOLS, limits, penalty=PENALTIES[1], device=CPU)
    for (best,), hypotheses in zip(greedy, draw(toy, limits, 5, temperature, **options), strict=True):
        assert [h.tokens for h in hypotheses] == [best.tokens] * 5


def test_the_seed_decides() -> None:
    toy = Toy(5, vocabulary=30)
    limits = Limits(0, [9, 9])
    first, again, other = ([[h.tokens for h in group] for group in draw(toy, limits, 8, seed=s)] for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("penalty", PENALTIES)
def test_scores_are_the_models_own(penalty: LengthPenalty) -> None:
    toy = Toy(6, vocabulary=12)
    found = draw(toy, Limits(0, [6, 3]), 6, temperature=3.0, top_k=5, top_p=0.9, penalty=penalty)
    for sentence, hypotheses in enumerate(found):
        assert len(hypotheses) == 6
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)
        for h in hypotheses:
            assert h.log_prob == pytest.approx(toy.log_prob(sentence, h.tokens), abs=1e-5)
            assert h.score == h.log_prob / penalty(len(h.tokens))
            assert h.attention is not None
            assert torch.equal(h.attention, toy.attention(sentence, h.tokens))


def test_limits_and_bans_hold() -> None:
    maxima = [6, 1, 4]
    toy = Toy(7, bias={PAD: 5.0, BOS: 5.0})
    for maximum, hypotheses in zip(maxima, draw(toy, Limits(2, maxima), 50, temperature=5.0), strict=True):
        for h in hypotheses:
            assert min(3, maximum) <= len(h.tokens) <= maximum
            assert h.tokens.index(EOS) == len(h.tokens) - 1
            assert not {PAD, BOS} & set(h.tokens)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("n_samples", 0),
    ],
)
def test_impossible_options_are_refused(name: str, value: float) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "n_samples": 1} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SamplingOptions(**options)
