import math

import pytest
import torch
from search_toy import BOS, CPU, EOS, PAD, PENALTIES, SYMBOLS, Toy, allowed

from nmt.translate.search.hypothesis import Hypothesis, LengthPenalty, Limits
from nmt.translate.search.rollout import greedy_search


def search(
    toy: Toy, limits: Limits, sentences: list[int] | None = None, penalty: LengthPenalty = PENALTIES[1]
) -> list[Hypothesis]:
    state = toy.start(sentences if sentences is not None else list(range(len(limits.max_lengths))))
    found = greedy_search(toy.step, state, SYMBOLS, limits, penalty=penalty, device=CPU)
    assert all(len(hypotheses) == 1 for hypotheses in found)
    return [hypothesis for (hypothesis,) in found]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("min_length", [0, 3])
def test_every_token_is_the_most_probable_allowed(seed: int, min_length: int) -> None:
    toy = Toy(seed, vocabulary=9)
    limits = Limits(min_length, [8, 1, 5, 8])
    for sentence, h in enumerate(search(toy, limits)):
        for t, token in enumerate(h.tokens):
            following = toy.next_log_probs(sentence, h.tokens[:t])
            assert token == max(allowed(t + 1, limits, sentence, 9), key=lambda other: following[other])


@pytest.mark.parametrize("penalty", PENALTIES)
def test_scores_are_those_of_the_tokens(penalty: LengthPenalty) -> None:
    toy = Toy(1, vocabulary=20)
    for sentence, h in enumerate(search(toy, Limits(0, [4, 9, 2, 9]), penalty=penalty)):
        assert h.log_prob == pytest.approx(toy.log_prob(sentence, h.tokens), abs=1e-5)
        assert h.score == h.log_prob / penalty(len(h.tokens))


def test_attention_rows_belong_to_their_tokens() -> None:
    toy = Toy(2, vocabulary=12)
    for sentence, h in enumerate(search(toy, Limits(0, [9, 2, 7, 9]))):
        assert h.attention is not None
        assert torch.equal(h.attention, toy.attention(sentence, h.tokens))


def test_no_attention_without_weights() -> None:
    assert search(Toy(0, attends=False), Limits(0, [5]))[0].attention is None


@pytest.mark.parametrize("bias", [-20.0, 20.0, -math.inf])
def test_lengths_keep_their_limits_and_every_hypothesis_ends(bias: float) -> None:
    found = search(Toy(3, bias={EOS: bias}), Limits(3, [6, 1, 4, 9]))
    assert [len(h.tokens) for h in found] == ([4, 1, 4, 4] if bias > 0 else [6, 1, 4, 9])
    assert all(h.tokens.index(EOS) == len(h.tokens) - 1 for h in found)


def test_banned_tokens_never_appear() -> None:
    toy = Toy(4, bias={PAD: 9.0, BOS: 9.0})
    assert not any({PAD, BOS} & set(h.tokens) for h in search(toy, Limits(0, [7] * 4)))


def test_finished_rows_leave_the_batch() -> None:
    toy = Toy(5, bias={EOS: -30.0})
    search(toy, Limits(0, [2, 5, 1, 4]))
    assert toy.rows == [4, 3, 2, 2, 1]


def test_batch_mates_and_their_order_change_nothing() -> None:
    toy = Toy(6, vocabulary=30)
    maxima = [9, 3, 6, 9]
    together = search(toy, Limits(0, maxima))
    for s, maximum in enumerate(maxima):
        alone = search(toy, Limits(0, [maximum]), [s])[0]
        assert (alone.tokens, alone.log_prob) == (together[s].tokens, together[s].log_prob)
    backwards = search(toy, Limits(0, maxima[::-1]), [3, 2, 1, 0])
    assert [h.tokens for h in backwards] == [h.tokens for h in together[::-1]]


def test_no_sentences_no_hypotheses() -> None:
    assert search(Toy(0), Limits(0, [])) == []
