"""BLEU over tokens against sacreBLEU's."""

import random

import pytest
from sacrebleu import sentence_bleu

from nmt.metrics.bleu import TokenBLEU


@pytest.mark.parametrize("vocabulary", [1, 3, 8, 50])
def test_equals_sacrebleus_sentence_score(vocabulary: int) -> None:
    draw = random.Random(vocabulary)
    for _ in range(150):
        reference, candidate = (
            [draw.randrange(vocabulary) for _ in range(draw.randint(shortest, 11))] for shortest in (1, 0)
        )
        texts = (" ".join(map(str, tokens)) for tokens in (candidate, reference))
        expected = sentence_bleu(next(texts), [next(texts)], tokenize="none").score
        assert 100 * TokenBLEU(reference)(candidate) == pytest.approx(expected, abs=1e-9)


def test_of_equal_sentences_it_is_1_and_without_a_match_0() -> None:
    assert TokenBLEU([4, 5])([4, 5]) == 1
    assert TokenBLEU([4, 5])([6, 7, 8, 9]) == 0
    assert TokenBLEU([])([]) == 0
