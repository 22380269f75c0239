"""Beam search compared with all hypotheses of a toy model and with plain lists; top-k; length penalties."""

import itertools
import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from search_toy import BOS, EOS, NO_PENALTY, PAD, PENALTIES, Prefixes, Toy, batch_of, bits, enumerate_all, plain_beam
from search_toy import search as configured
from torch import Tensor

from nmt.model.seq2seq import StepOutput
from nmt.translate.beam import CACHED_NUMBERS, _Finished, beam_search
from nmt.translate.search import Hypothesis, Limits
from nmt.translate.selection import Candidates, Coverage, Scorer, Selection, pack_top
from nmt.translate.steps import BLOCK

AVERAGE = Scorer("average", 1.0)
Stop = Literal["beam", "exact"]
STOPS: tuple[Stop, ...] = ("beam", "exact")


def search(
    toy: Toy,
    limits: Limits,
    beam_size: int,
    n_best: int = 1,
    penalty: Scorer = AVERAGE,
    sentences: list[int] | None = None,
    stop: Stop = "beam",
    cached: int = CACHED_NUMBERS,
) -> list[list[Hypothesis]]:
    batch, selection = batch_of(toy, limits, sentences), Selection(beam_size, EOS)
    return beam_search(batch, selection, n_best, scorer=penalty, stop=stop, cached_numbers=cached)


@pytest.mark.parametrize("coarse", [False, True])
def test_a_beam_of_one_is_greedy_search(coarse: bool) -> None:
    for seed in range(4):
        limits, toy = Limits(seed % 3, [8, 1, 5, 8]), Toy(seed, vocabulary=7, coarse=coarse)
        greedy = configured("greedy", batch_of(toy, limits))
        assert bits(search(toy, limits, 1, penalty=NO_PENALTY)) == bits(greedy)


@pytest.mark.parametrize(("penalty", "stop"), [*zip(PENALTIES[1:], ("beam", "exact", "exact"), strict=True)])
def test_a_large_beam_is_exhaustive_search(penalty: Scorer, stop: Stop) -> None:
    for min_length, n_best, prefix in itertools.product([0, 2], [1, 4, 60], [[], [4, 3]]):
        limits, toy = Limits(min_length, [4, 4 - bool(prefix), 3], [prefix, [], prefix]), Toy(min_length)
        results = search(toy, limits, 100, n_best, penalty, stop=stop)
        for sentence, (hypotheses, start) in enumerate(zip(results, limits.prefixes, strict=True)):
            pairs = enumerate_all(toy, Limits(0 if start else min_length, limits.max_lengths), sentence)
            fitting = [(p / penalty.penalty(len(t)), t) for t, p in pairs if t[: len(start)] == start]
            fitting = [pair for pair in fitting if len(pair[1]) > min(min_length, limits.max_lengths[sentence] - 1)]
            expected = sorted(fitting, reverse=True)[:n_best]
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens in expected]
            assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-5)


@pytest.mark.parametrize(
    ("beam_size", "n_best", "penalty", "stop"),
    [
        (1, 1, PENALTIES[1], "exact"),
        (2, 1, PENALTIES[3], "exact"),
        (3, 2, PENALTIES[2], "beam"),
        (5, 5, PENALTIES[0], "exact"),
        (5, 5, PENALTIES[1], "beam"),
    ],
)
def test_neither_batching_nor_early_stopping_changes_the_result(
    penalty: Scorer, beam_size: int, n_best: int, stop: Stop
) -> None:
    limits = Limits(1, [9, 5, 12])
    for seed in range(3):
        toy = Toy(seed, vocabulary=9, bias={EOS: 1.0})
        for sentence, hypotheses in enumerate(search(toy, limits, beam_size, n_best, penalty, stop=stop)):
            expected = plain_beam(toy, limits, sentence, beam_size, penalty, stop)[:n_best]
            assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected]
            assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)


class Fixed(Toy):
    """A toy whose logits depend only on the last token: they are its row in `following`."""

    following: Tensor

    def step(self, tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        return super().step(tokens, state)._replace(logits=self.following[tokens])


def ends_late(word: float) -> Fixed:
    """Make a toy that writes 3 with the probability `word`, then 4 with 0.9, and then ends; else it ends at once."""
    toy = Fixed(0, vocabulary=5)
    toy.following = torch.full((5, 5), -math.inf)
    toy.following[BOS, 3], toy.following[BOS, EOS] = math.log(word), math.log(1 - word)
    toy.following[3, 4], toy.following[3, EOS] = math.log(0.9), math.log(0.1)
    toy.following[4, EOS] = 0.0
    return toy


@pytest.mark.parametrize("stop", STOPS)
def test_when_the_search_stops(stop: Stop) -> None:
    # Two improbable hypotheses (0.1 and 0.9 * 0.1) end before the most probable one (0.9 * 0.9 * 1).
    ((hypothesis,),) = search(ends_late(0.9), Limits(0, [9]), 2, penalty=NO_PENALTY, stop=stop)
    assert hypothesis.tokens == [3, 4, EOS]
    # With length^3: log 0.9 ends first. log(0.1 * 0.9) / 8 is below it, but log(0.1 * 0.9) / 27 is above.
    ((hypothesis,),) = search(ends_late(0.1), Limits(0, [9]), 2, penalty=Scorer("average", 3.0), stop=stop)
    assert hypothesis.tokens == ([EOS] if stop == "beam" else [3, 4, EOS])
    # The vocabulary has a single word, so one hypothesis finishes per step. A search for five would take five steps.
    toy = Toy(0, vocabulary=4, bias={EOS: 9.0})
    search(toy, Limits(0, [12]), 5, penalty=NO_PENALTY, stop=stop)
    assert len(toy.rows) <= 2
    # A longer hypothesis can always have a better average, so only the number of finished hypotheses stops the search.
    toy = Toy(0, bias={EOS: 3.0})
    search(toy, Limits(0, [15]), 3, penalty=Scorer("average", 3.0), stop=stop)
    assert (len(toy.rows) < 15) == (stop == "beam")


def test_a_coverage_penalty_does_not_prolong_the_search() -> None:
    """The live hypothesis, which has no coverage score yet, is compared with the finished one without its score."""
    scorer = Coverage(Scorer("average", 1.0), 1.0, [4])
    scorer.attend(torch.full((1, 4), 0.1))
    finished = _Finished(Limits(0, [60]), scorer, n_best=1, max_endings=1)
    row = np.zeros((1, 1), np.int64)
    finished.add(3, [0], Candidates(np.full((1, 1), -2.0, np.float32), row, row), np.ones((1, 1), np.bool_))
    assert finished.best()[0][0].score < -2.0
    assert not finished.can_improve(4, 0, -4.0, rival=-4.0)
    assert finished.can_improve(4, 0, -2.0, rival=-2.0)


@pytest.mark.parametrize("coarse", [False, True])
def test_batch_mates_their_order_and_chunks_change_nothing(coarse: bool) -> None:
    maxima = [7, 3, 10, 1, 6]
    toy = Toy(3, vocabulary=70, bias={EOS: 2.0}, coarse=coarse)
    together = search(toy, Limits(1, maxima), 4, 3)
    for order in itertools.islice(itertools.permutations(range(5)), 0, None, 17):
        limits = Limits(1, [maxima[s] for s in order])
        for cached in (1, 200, CACHED_NUMBERS):
            shuffled = search(toy, limits, 4, 3, sentences=list(order), cached=cached)
            assert bits(shuffled) == bits([together[s] for s in order])
    for s, most in enumerate(maxima):
        assert bits(search(toy, Limits(1, [most]), 4, 3, sentences=[s])) == bits([together[s]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hypotheses_are_distinct_sorted_and_have_the_scores_of_their_tokens(dtype: torch.dtype) -> None:
    toy = Toy(4, vocabulary=12, dtype=dtype, bias={PAD: 9.0, BOS: 9.0})
    for penalty in PENALTIES:
        for sentence, hypotheses in enumerate(search(toy, Limits(0, [8, 5, 8]), 4, 4, penalty)):
            scores = [h.score for h in hypotheses]
            assert scores == sorted(scores, reverse=True)
            assert len({tuple(h.tokens) for h in hypotheses}) == 4
            for h in hypotheses:
                assert not {PAD, BOS} & set(h.tokens)  # no search generates PAD or BOS
                assert h.log_prob == pytest.approx(toy.log_prob(sentence, h.tokens), abs=1e-5)
                assert h.score == h.log_prob / penalty.penalty(len(h.tokens))


def test_impossible_hypotheses_are_not_returned() -> None:
    def found(toy: Toy, maxima: list[int]) -> list[list[list[int]]]:
        return [[h.tokens for h in nbest] for nbest in search(toy, Limits(1, maxima), 8, 8)]

    # Only word 3 and EOS have a probability above 0: there is one hypothesis per length.
    (hypotheses,) = found(Toy(9, bias={4: -math.inf, 5: -math.inf}), [4])
    assert sorted(hypotheses) == [[3, EOS], [3, 3, EOS], [3, 3, 3, EOS]]
    assert found(Toy(0, bias={token: math.nan for token in range(6)}), [4, 4]) == [[], []]
    assert found(Toy(0, bias={EOS: -math.inf}), [4, 4]) == [[], []]
    assert found(Toy(0), []) == []


@pytest.mark.parametrize("granularity", [0.0, 0.5, 3.0])  # a coarser grid makes more values equal
@given(in_blocks=st.booleans(), blocks=st.integers(1, 20), k=st.integers(1, BLOCK), seed=st.integers(0, 10**6))
def test_top_k_is_a_stable_sort_cut_off(granularity: float, in_blocks: bool, blocks: int, k: int, seed: int) -> None:
    values = -4 * torch.rand(3, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    if granularity:
        values = (values / granularity).round() * granularity  # may give 0 and -0
    values[:, seed % 7 :: 5] = -math.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    packed = pack_top(values, k, few=0 if in_blocks else len(values.flatten())).numpy()
    top = Candidates.of(packed, width=1, vocabulary=values.shape[1])
    assert (top.log_probs == expected.values[:, :k].numpy()).all()
    assert (top.tokens == expected.indices[:, :k].numpy()).all()


@given(st.floats(0, 3), st.integers(1, 300))
def test_length_penalties_are_those_of_their_definitions_and_never_fall(alpha: float, length: int) -> None:
    assert Scorer("none", alpha).penalty(length) == 1
    average, gnmt = Scorer("average", alpha), Scorer("gnmt", alpha)
    assert math.log(average.penalty(length)) == pytest.approx(alpha * math.log(length))
    assert math.log(gnmt.penalty(length)) == pytest.approx(alpha * (math.log(5 + length) - math.log(6)))
    for penalty in (average, gnmt):
        assert 1 <= penalty.penalty(length) <= penalty.penalty(length + 1)
