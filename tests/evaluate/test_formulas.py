"""Scores from sums of sentence statistics equal sacreBLEU's, for any texts."""

import random

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.evaluate.bleu import METRICS, ScoreSettings, count, sentence_bleu
from nmt.evaluate.formulas import FORMULAS

WORDS = ["a", "b", "c", "d", "the", "The", "cat", "sat", ",", ".", "zz"]
PLAIN = ScoreSettings("13a", False)


def drawn(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, longest)))


def test_scores_are_sacrebleus() -> None:
    """Empty texts, n-grams that do not exist and orders without a match among them."""
    rng = random.Random(0)
    for case in range(300):
        size, longest = rng.choice([1, 1, 2, 5]), rng.choice([1, 3, 6, 12])
        hypotheses, references = ([drawn(rng, longest) for _ in range(size)] for _ in range(2))
        counts = count(hypotheses, references, PLAIN).counts
        found = [float(FORMULAS[name](counts[name].sum(0).astype(float))) for name in METRICS]
        metrics = BLEU(force=True), CHRF(), TER()
        expected = [metric.corpus_score(hypotheses, [references]).score for metric in metrics]
        assert found == pytest.approx(expected, abs=1e-9), (case, hypotheses, references)
        sentence = BLEU(force=True, effective_order=True)
        each = [
            sentence.sentence_score(*pair).score for pair in zip(hypotheses, ([r] for r in references), strict=True)
        ]
        assert list(sentence_bleu(counts["bleu"])) == pytest.approx(each, abs=1e-9)


def test_many_sums_have_the_scores_of_each() -> None:
    rng = random.Random(1)
    texts = [[drawn(rng, 8) for _ in range(12)] for _ in range(2)]
    for name, rows in count(*texts, PLAIN).counts.items():
        sums = rows.astype(float).reshape(2, 6, -1)
        together = FORMULAS[name](sums)
        assert together.shape == (2, 6)
        assert np.array_equal(together, [[FORMULAS[name](one) for one in part] for part in sums])
    assert FORMULAS["comet"](np.array([[3.0, 4.0], [1.0, 2.0]])).tolist() == [0.75, 0.5]
