import itertools
import math
from typing import Literal

import pytest
import torch
from search_toy import (
    BOS,
    CPU,
    EOS,
    NO_PENALTY,
    PAD,
    PENALTIES,
    SYMBOLS,
    Prefixes,
    Toy,
    allowed,
    enumerate_all,
)
from torch import Tensor

from nmt.model.state import StepOutput
from nmt.translate.search import beam as module
from nmt.translate.search.beam import beam_search
from nmt.translate.search.hypothesis import Hypothesis, LengthPenalty, Limits
from nmt.translate.search.rollout import greedy_search

AVERAGE = LengthPenalty("average", 1.0)
Stop = Literal["beam", "exact"]
STOPS: tuple[Stop, ...] = ("beam", "exact")


def search(
    toy: Toy,
    limits: Limits,
    beam_size: int,
    n_best: int = 1,
    penalty: LengthPenalty = AVERAGE,
    sentences: list[int] | None = None,
    stop: Stop = "beam",
) -> list[list[Hypothesis]]:
    sentences = list(range(len(limits.max_lengths))) if sentences is None else sentences
    state = toy.start(sentences)
    return beam_search(
        toy.step, state, SYMBOLS, limits, beam_size=beam_size, n_best=n_best, penalty=penalty, stop=stop, device=CPU
    )


def rows(hypothesis: Hypothesis) -> Tensor:
    assert hypothesis.attention is not None
    return hypothesis.attention


def same(left: list[Hypothesis], right: list[Hypothesis]) -> bool:
    return len(left) == len(right) and all(
        (a.tokens, a.score, a.log_prob) == (b.tokens, b.score, b.log_prob) and torch.equal(rows(a), rows(b))
        for a, b in zip(left, right, strict=True)
    )


def reference_beam(
    toy: Toy, limits: Limits, sentence: int, beam_size: int, n_best: int, penalty: LengthPenalty, stop: Stop = "beam"
) -> list[tuple[list[int], float]]:
    """Plain lists, one sentence, all candidates sorted, and no early stop but at K finished hypotheses with "beam"."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    while live and (stop == "exact" or len(finished) < beam_size):
        candidates = []
        for prefix, log_prob in live:
            following = toy.next_log_probs(sentence, prefix)
            for token in allowed(len(prefix) + 1, limits, sentence, toy.vocabulary):
                candidates.append(([*prefix, token], log_prob + following[token]))
        candidates.sort(key=lambda candidate: -candidate[1])
        ended = [c for c in candidates[:beam_size] if c[0][-1] == EOS]
        finished += [(tokens, log_prob / penalty(len(tokens))) for tokens, log_prob in ended]
        live = [c for c in candidates if c[0][-1] != EOS][:beam_size]
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])[:n_best]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_beam_of_one_is_greedy_search(seed: int, coarse: bool) -> None:
    limits = Limits(seed % 3, [8, 1, 5, 8])
    toy = Toy(seed, vocabulary=7, coarse=coarse)
    greedy = greedy_search(toy.step, toy.start([0, 1, 2, 3]), SYMBOLS, limits, penalty=AVERAGE, device=CPU)
    assert all(map(same, search(toy, limits, beam_size=1), greedy))


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("min_length", [0, 2])
@pytest.mark.parametrize("n_best", [1, 4, 60])
@pytest.mark.parametrize("stop", STOPS)
def test_a_large_beam_is_exhaustive_search(penalty: LengthPenalty, min_length: int, n_best: int, stop: Stop) -> None:
    limits = Limits(min_length, [4, 1, 3, 4])
    for seed in range(2):
        toy = Toy(seed)
        found = search(toy, limits, 100, n_best, penalty, stop=stop)
        for sentence, hypotheses in enumerate(found):
            every = [(p / penalty(len(t)), t) for t, p in enumerate_all(toy, limits, sentence)]
            expected = sorted(every, reverse=True)[:n_best]
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens in expected]
            assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("beam_size", "n_best"), [(1, 1), (2, 1), (3, 2), (5, 1), (5, 5)])
@pytest.mark.parametrize("stop", STOPS)
def test_neither_batching_nor_early_stopping_changes_the_result(
    penalty: LengthPenalty, beam_size: int, n_best: int, stop: Stop
) -> None:
    limits = Limits(1, [9, 5, 12])
    for seed in range(5):
        toy = Toy(seed, vocabulary=9, bias={EOS: 1.0})
        found = search(toy, limits, beam_size, n_best, penalty, stop=stop)
        for sentence, hypotheses in enumerate(found):
            expected = reference_beam(toy, limits, sentence, beam_size, n_best, penalty, stop)
            assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected]
            assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)


@pytest.mark.parametrize("vocabulary", [63, 64, 65, 200])
def test_any_vocabulary_size(vocabulary: int) -> None:
    limits = Limits(0, [6])
    toy = Toy(0, vocabulary, bias={vocabulary - 1: 2.0})
    expected = reference_beam(toy, limits, 0, 4, 4, AVERAGE)
    assert [h.tokens for h in search(toy, limits, 4, 4)[0]] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(("stop", "best"), [("beam", [EOS]), ("exact", [3, 4, EOS])])
def test_only_the_exact_rule_finds_what_ends_after_k_others(stop: Stop, best: list[int]) -> None:
    """Two improbable hypotheses end before the probable one: 0.1, 0.9 * 0.1, and 0.9 * 0.9 * 1."""
    following = torch.full((5, 5), -math.inf)
    following[BOS, 3] = following[3, 4] = math.log(0.9)
    following[BOS, EOS] = following[3, EOS] = math.log(0.1)
    following[4, EOS] = 0.0
    toy = Toy(0, vocabulary=5)

    def step(tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        return toy.step(tokens, state)._replace(logits=following[tokens])

    ((found,),) = beam_search(
        step, toy.start([0]), SYMBOLS, Limits(0, [9]), beam_size=2, penalty=NO_PENALTY, stop=stop, device=CPU
    )
    assert found.tokens == best


@pytest.mark.parametrize("stop", STOPS)
def test_stops_once_no_live_hypothesis_can_win(stop: Stop) -> None:
    # With a single word, a hypothesis finishes at each step: five of them would take five steps.
    toy = Toy(0, vocabulary=4, bias={EOS: 9.0})
    search(toy, Limits(0, [12]), beam_size=5, penalty=NO_PENALTY, stop=stop)
    assert len(toy.rows) <= 2


def test_stops_at_k_finished() -> None:
    # The average over a long hypothesis could always win: only the number of finished ones stops the search.
    toy = Toy(0, bias={EOS: 3.0})
    search(toy, Limits(0, [15]), beam_size=3, penalty=LengthPenalty("average", 3.0))
    assert len(toy.rows) < 15


def test_finished_sentences_leave_the_batch() -> None:
    toy = Toy(1, vocabulary=30, bias={EOS: -9.0})
    search(toy, Limits(0, [2, 5, 1, 4]), beam_size=3, n_best=3)
    assert toy.rows == [4, 9, 6, 6, 3]


@pytest.mark.parametrize("coarse", [False, True])
def test_batch_mates_and_their_order_change_nothing(coarse: bool) -> None:
    maxima = [7, 3, 10, 1, 6]
    toy = Toy(3, vocabulary=70, bias={EOS: 2.0}, coarse=coarse)
    together = search(toy, Limits(1, maxima), 4, 3)
    for order in itertools.islice(itertools.permutations(range(5)), 0, None, 17):
        shuffled = search(toy, Limits(1, [maxima[s] for s in order]), 4, 3, sentences=list(order))
        assert all(same(shuffled[place], together[s]) for place, s in enumerate(order))
    for s, maximum in enumerate(maxima):
        assert same(search(toy, Limits(1, [maximum]), 4, 3, sentences=[s])[0], together[s])


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_the_tokens(penalty: LengthPenalty, dtype: torch.dtype) -> None:
    toy = Toy(4, vocabulary=12, dtype=dtype)
    for sentence, hypotheses in enumerate(search(toy, Limits(0, [8, 5, 8]), 4, 4, penalty)):
        for h in hypotheses:
            assert h.log_prob == pytest.approx(toy.log_prob(sentence, h.tokens), abs=1e-5)
            assert h.score == h.log_prob / penalty(len(h.tokens))


def test_attention_rows_belong_to_their_tokens() -> None:
    toy = Toy(5, vocabulary=12)
    for sentence, hypotheses in enumerate(search(toy, Limits(0, [9, 2, 7, 9]), 5, 5)):
        for h in hypotheses:
            assert torch.equal(rows(h), toy.attention(sentence, h.tokens))


def test_no_attention_without_weights() -> None:
    assert search(Toy(0, attends=False), Limits(0, [5]), 2)[0][0].attention is None


@pytest.mark.parametrize("min_length", [0, 3, 20])
@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_lengths_keep_their_limits_and_every_hypothesis_ends(min_length: int, bias: float) -> None:
    maxima = [6, 1, 4, 9]
    found = search(Toy(6, bias={EOS: bias}), Limits(min_length, maxima), 4, 4)
    for maximum, hypotheses in zip(maxima, found, strict=True):
        assert hypotheses
        for h in hypotheses:
            assert min(min_length + 1, maximum) <= len(h.tokens) <= maximum
            assert h.tokens.index(EOS) == len(h.tokens) - 1


def test_banned_tokens_never_appear() -> None:
    toy = Toy(7, bias={PAD: 9.0, BOS: 9.0})
    for hypotheses in search(toy, Limits(0, [7, 7]), 4, 4):
        for h in hypotheses:
            assert not {PAD, BOS} & set(h.tokens)


def test_the_n_best_are_distinct_and_sorted() -> None:
    for hypotheses in search(Toy(8, vocabulary=20), Limits(0, [8] * 6), 6, 6):
        assert len({tuple(h.tokens) for h in hypotheses}) == 6
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)


def test_impossible_hypotheses_are_not_returned() -> None:
    # Only words 3 and eos have any probability: one hypothesis for every length.
    toy = Toy(9, bias={4: -math.inf, 5: -math.inf})
    (hypotheses,) = search(toy, Limits(1, [4]), 8, 8)
    assert sorted(h.tokens for h in hypotheses) == [[3, EOS], [3, 3, EOS], [3, 3, 3, EOS]]
    assert all(math.isfinite(h.log_prob) for h in hypotheses)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_model_without_probabilities_finds_nothing(broken: float) -> None:
    toy = Toy(0, bias={token: broken for token in range(6)} if math.isnan(broken) else {EOS: broken})
    assert search(toy, Limits(0, [4, 4]), 3) == [[], []]


def test_no_sentences_no_hypotheses() -> None:
    assert search(Toy(0), Limits(0, []), 3) == []


def test_the_logits_of_the_model_are_left_alone() -> None:
    logits = torch.randn(12, 8)
    before = logits.clone()
    toy = Toy(0, vocabulary=8)

    def step(tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        return toy.step(tokens, state)._replace(logits=logits[: len(tokens)])

    beam_search(step, toy.start([0, 1, 2]), SYMBOLS, Limits(1, [4] * 3), beam_size=4, penalty=NO_PENALTY, device=CPU)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("beam_size", "n_best"), [(0, 1), (2, 3), (2, 0)])
def test_impossible_sizes_are_refused(beam_size: int, n_best: int) -> None:
    with pytest.raises(ValueError, match=f"n_best is {n_best} and beam_size {beam_size}"):
        search(Toy(0), Limits(0, [4]), beam_size, n_best)


@pytest.mark.parametrize("numbers", [1, 200])
def test_candidates_ranked_a_few_sentences_at_a_time_are_the_same(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits of their own, and more hypotheses the longer they go on."""
    limits = Limits(1, [2, 6, 4, 5, 3])
    toy = Toy(3)
    whole = search(toy, limits, 3, n_best=3)
    monkeypatch.setattr(module, "CACHED_NUMBERS", numbers)
    for few, together in zip(search(toy, limits, 3, n_best=3), whole, strict=True):
        assert same(few, together)
