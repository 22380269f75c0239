"""Similarities of translations equal those of sacreBLEU, pair by pair."""

import random
import unicodedata

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from nmt.translate.similarity import Utility, mean_utilities, pairwise_similarities

METRICS = {"chrf": CHRF(), "bleu": BLEU(effective_order=True)}
UTILITIES: list[Utility] = ["chrf", "bleu"]


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    words = ["le", "chat", "l'eau,", "dort", ".", "(ici)", "3.14", "caf\u00e9", "cafe\u0301", "x"]
    return [" ".join(draw.choice(words) for _ in range(draw.randint(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("utility", UTILITIES)
def test_every_pair_has_its_score_of_sacrebleu(utility: Utility) -> None:
    for seed in range(4):
        found = [*texts(seed, 12), "", " ", "x", "ab", "le chat dort", "le chat dort"]
        expected = [[METRICS[utility].sentence_score(one, [other]).score for other in found] for one in found]
        np.testing.assert_allclose(pairwise_similarities(found, utility), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("utility", UTILITIES)
def test_the_mean_is_over_all_others_also_over_equal_ones(utility: Utility) -> None:
    for seed in range(4):
        found = texts(seed, 5)
        found += [found[0], found[1], found[0], ""]
        same = [unicodedata.normalize("NFC", text) for text in found]
        for i, mean in enumerate(mean_utilities(found, utility)):
            others = [METRICS[utility].sentence_score(same[i], [same[j]]).score for j in range(len(same)) if j != i]
            assert mean == pytest.approx(np.mean(others), abs=1e-6)
    assert [mean_utilities([text], utility) for text in ("le chat", "")] == [[100.0]] * 2  # there is no other
