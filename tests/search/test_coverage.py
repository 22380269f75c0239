"""Coverage scores against every hypothesis of a small model, scored in plain loops."""

import itertools
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from search_toy import BOS, CPU, EOS, PENALTIES, SYMBOLS, Prefixes, Toy, allowed, enumerate_all
from torch import Tensor

from nmt.model.state import StepOutput
from nmt.translate.search.beam import beam_search
from nmt.translate.search.coverage import Coverage, CoverageScore
from nmt.translate.search.diverse import Groups
from nmt.translate.search.hypothesis import Hypothesis, LengthPenalty, Limits

AVERAGE = LengthPenalty("average", 1.0)
NO_LENGTH = LengthPenalty("none", 0.0)
LENGTH_SCORE = CoverageScore(2.0, floor=0.3, cap=1000.0)


@dataclass
class Attending:
    """A toy whose attention depends on the sentence and the prefix; it leaves out some tokens, and the padding."""

    toy: Toy
    lengths: list[int]  # of sentence i
    padding: int = 0  # positions after the longest sentence

    @staticmethod
    @cache
    def drawn(sentence: int, prefix: tuple[int, ...], length: int) -> list[float]:
        code = 7 * sentence
        for token in prefix:
            code = 31 * code + token
        drawn = np.random.default_rng(code).random(length)
        sparse = np.where(drawn > 0.4, drawn**4, 0.0)
        return (sparse / max(sparse.sum(), 1e-9)).tolist()

    def weights(self, sentence: int, prefix: list[int]) -> list[float]:
        """Of the step after the prefix."""
        return self.drawn(sentence, tuple(prefix), self.lengths[sentence])

    def step(self, tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        output = self.toy.step(tokens, state)
        rows = zip(output.state.sentences.tolist(), output.state.tokens.tolist(), strict=True)
        weights = torch.zeros(len(tokens), max(self.lengths) + self.padding)
        for row, (sentence, prefix) in zip(weights, rows, strict=True):
            row[: self.lengths[sentence]] = torch.tensor(self.weights(sentence, prefix))
        return output._replace(weights=weights)

    def covered(self, sentence: int, tokens: list[int], score: CoverageScore) -> float:
        """The definition in plain loops."""
        sums = [0.0] * self.lengths[sentence]
        for step in range(len(tokens)):
            for position, weight in enumerate(self.weights(sentence, [BOS, *tokens[:step]])):
                sums[position] += weight
        return score.strength * sum(math.log(min(max(total, score.floor), score.cap)) for total in sums)


def search(
    model: Attending,
    limits: Limits,
    beam_size: int,
    n_best: int,
    score: CoverageScore | None,
    penalty: LengthPenalty = AVERAGE,
    sentences: list[int] | None = None,
    groups: Groups | None = None,
    stop: str = "beam",
) -> list[list[Hypothesis]]:
    sentences = list(range(len(limits.max_lengths))) if sentences is None else sentences
    coverage = None if score is None else Coverage(score, [model.lengths[sentence] for sentence in sentences])
    options = {"beam_size": beam_size, "n_best": n_best, "penalty": penalty, "coverage": coverage, "groups": groups}
    options["stop"] = stop
    return beam_search(model.step, model.toy.start(sentences), SYMBOLS, limits, device=CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("penalty", "score"),
    [*((penalty, CoverageScore(0.3)) for penalty in PENALTIES[:2]), (NO_LENGTH, LENGTH_SCORE)],
)
@pytest.mark.parametrize("n_best", [1, 5])
def test_a_large_beam_finds_the_best_scores_of_all_hypotheses(
    penalty: LengthPenalty, score: CoverageScore, n_best: int
) -> None:
    """Also with early stopping: with one best, no live hypothesis may be given up that its coverage would lift."""
    limits, changed = Limits(0, [4, 1, 3, 4]), 0
    for seed in range(2):
        model = Attending(Toy(seed), [3, 5, 2, 4])
        found = search(model, limits, 100, n_best, score, penalty)
        for sentence, hypotheses in enumerate(found):
            every = [
                (log_prob / penalty(len(tokens)) + model.covered(sentence, tokens, score), tokens)
                for tokens, log_prob in enumerate_all(model.toy, limits, sentence)
            ]
            expected = sorted(every, reverse=True)[:n_best]
            assert [h.score for h in hypotheses] == pytest.approx([value for value, _ in expected], abs=1e-5)
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens in expected]
            plain = search(model, limits, 100, 1, None, penalty)[sentence][0]
            changed += plain.tokens != hypotheses[0].tokens
    assert changed > 1


def plain_beam(
    model: Attending, limits: Limits, sentence: int, beam_size: int, penalty: LengthPenalty, score: CoverageScore
) -> list[int]:
    """Plain lists without early stopping: the best of all hypotheses that end while they are among the K best."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[float, list[int]]] = []
    while live:
        candidates = []
        for prefix, log_prob in live:
            following = model.toy.next_log_probs(sentence, prefix)
            for token in allowed(len(prefix) + 1, limits, sentence, model.toy.vocabulary):
                candidates.append(([*prefix, token], log_prob + following[token]))
        candidates.sort(key=lambda candidate: -candidate[1])
        for tokens, log_prob in candidates[:beam_size]:
            if tokens[-1] == EOS:
                covered = model.covered(sentence, tokens, score)
                finished.append((log_prob / penalty(len(tokens)) + covered, tokens))
        live = [candidate for candidate in candidates if candidate[0][-1] != EOS][:beam_size]
    return max(finished)[1]


@pytest.mark.parametrize(("penalty", "score"), [(AVERAGE, CoverageScore(0.2)), (NO_LENGTH, LENGTH_SCORE)])
def test_the_search_goes_on_while_a_live_hypothesis_may_cover_more(
    penalty: LengthPenalty, score: CoverageScore
) -> None:
    sentences = range(12)
    model, limits = Attending(Toy(5, vocabulary=9), [4] * 12), Limits(0, [7] * 12)
    found = search(model, limits, 3, 1, score, penalty, stop="exact")
    expected = [plain_beam(model, limits, sentence, 3, penalty, score) for sentence in sentences]
    assert [h.tokens for (h,) in found] == expected


def test_without_a_cap_coverage_normalises_the_length() -> None:
    model, limits = Attending(Toy(1, vocabulary=9), [4] * 30), Limits(0, [9] * 30)

    def mean_length(score: CoverageScore | None) -> float:
        return float(np.mean([len(h.tokens) for (h,) in search(model, limits, 6, 1, score, NO_LENGTH, stop="exact")]))

    lengths = [mean_length(score) for score in (None, CoverageScore(2.0, 0.3), LENGTH_SCORE)]
    assert lengths == sorted(lengths)
    assert lengths[2] > lengths[1] + 0.5


def test_a_penalty_of_zero_changes_no_bit() -> None:
    model, limits = Attending(Toy(2, vocabulary=12), [3, 5, 2]), Limits(1, [7, 9, 5])
    zero = CoverageScore(0.0, 0.2, 7.0)
    for without, with_zero in zip(search(model, limits, 4, 3, None), search(model, limits, 4, 3, zero), strict=True):
        for one, other in zip(without, with_zero, strict=True):
            assert (one.tokens, one.score, one.log_prob) == (other.tokens, other.score, other.log_prob)


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_mates_and_padding_change_no_bit(groups: int) -> None:
    maxima, lengths = [7, 3, 9, 6], [3, 11, 2, 7]
    model, padded = (Attending(Toy(3, vocabulary=70), lengths, padding) for padding in (0, 21))
    options = {} if groups == 1 else {"groups": Groups(groups, 0.5, 4)}

    def found(which: Attending, sentences: list[int]) -> list[list[tuple[list[int], float]]]:
        limits = Limits(1, [maxima[sentence] for sentence in sentences])
        nbest = search(which, limits, 4, 3, CoverageScore(0.4), sentences=sentences, **options)
        return [[(h.tokens, h.score) for h in hypotheses] for hypotheses in nbest]

    together = found(model, [0, 1, 2, 3])
    assert found(padded, [0, 1, 2, 3]) == together
    for order in itertools.islice(itertools.permutations(range(4)), 0, None, 7):
        assert found(model, list(order)) == [together[sentence] for sentence in order]
    for sentence, expected in enumerate(together):
        assert found(padded, [sentence]) == [expected]


def test_the_equation() -> None:
    sums = np.array([0.5, 1.0, 2.5, 0.25], np.float32)
    assert CoverageScore(0.2)(sums) == pytest.approx(0.2 * math.log(0.125))
    assert CoverageScore(0.2, 0.4, 1000.0)(sums) == pytest.approx(0.2 * math.log(0.5 * 2.5 * 0.4))
    assert CoverageScore(1.0)(np.array([0.0], np.float32)) == pytest.approx(math.log(1e-6))


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the coverage's strength is -0.1, but must be at least 0"):
        CoverageScore(-0.1)
    for floor, cap in [(0.0, 1.0), (0.5, 0.5)]:
        with pytest.raises(ValueError, match="must be above 0 and below the cap"):
            CoverageScore(0.1, floor, cap)
    toy = Toy(0, attends=False)
    with pytest.raises(ValueError, match="needs a model with attention"):
        beam_search(
            toy.step,
            toy.start([0]),
            SYMBOLS,
            Limits(0, [3]),
            beam_size=2,
            penalty=AVERAGE,
            device=CPU,
            coverage=Coverage(CoverageScore(0.1), [3]),
        )
