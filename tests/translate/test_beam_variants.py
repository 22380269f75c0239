"""Coverage scores, diverse groups and the beam's tree against plain lists, and the laws that tie them to a beam."""

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
from search_toy import BOS, EOS, PENALTIES, Prefixes, Toy, allowed, batch_of, bits, enumerate_all, plain_beam
from search_toy import search as configured
from torch import Tensor

from nmt.model.state import StepOutput
from nmt.translate.beam import Scorer, Selection, beam_search
from nmt.translate.beam_variants import Coverage, CoverageScore, Node, Recorder
from nmt.translate.phrases import Forbidden
from nmt.translate.search import Hypothesis, Limits

AVERAGE = Scorer("average", 1.0)
NO_LENGTH = Scorer("none", 0.0)
LENGTH_SCORE = CoverageScore(2.0, floor=0.3, cap=1000.0)
Stop = Literal["beam", "exact"]
Scored = list[tuple[list[int], float]]


@dataclass
class Attending:
    """A toy whose attention depends on the sentence and the prefix; it leaves out some tokens, and the padding."""

    toy: Toy
    lengths: list[int]  # of sentence i
    padding: int = 0  # positions after the longest sentence

    def start(self, sentences: list[int]) -> Prefixes:
        return self.toy.start(sentences)

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
    n_best: int,
    score: CoverageScore | None,
    penalty: Scorer = AVERAGE,
    sentences: list[int] | None = None,
    **changes: Any,  # noqa: ANN401
) -> list[list[Hypothesis]]:
    sentences = list(range(len(limits.max_lengths))) if sentences is None else sentences
    batch = batch_of(model, limits, sentences, lengths=[model.lengths[sentence] for sentence in sentences])
    changes |= {"length_penalty": penalty.kind, "alpha": penalty.alpha}
    if score is not None:
        changes |= {"coverage_penalty": score.strength, "coverage_floor": score.floor, "coverage_cap": score.cap}
    return configured("beam", batch, n_best, **changes)


@pytest.mark.parametrize(
    ("penalty", "score"),
    [*((penalty, CoverageScore(0.3)) for penalty in PENALTIES[:2]), (NO_LENGTH, LENGTH_SCORE)],
)
@pytest.mark.parametrize("n_best", [1, 5])
def test_a_large_beam_finds_the_best_scores_of_all_hypotheses(
    penalty: Scorer, score: CoverageScore, n_best: int
) -> None:
    """Also with early stopping: with one best, no live hypothesis may be given up that its coverage would lift."""
    limits, changed = Limits(0, [4, 1, 3, 4]), 0
    for seed in range(2):
        model = Attending(Toy(seed), [3, 5, 2, 4])
        plain = search(model, limits, 1, None, penalty, beam_size=100)
        for sentence, hypotheses in enumerate(search(model, limits, n_best, score, penalty, beam_size=100)):
            every = [
                (log_prob / penalty.penalty(len(tokens)) + model.covered(sentence, tokens, score), tokens)
                for tokens, log_prob in enumerate_all(model.toy, limits, sentence)
            ]
            expected = sorted(every, reverse=True)[:n_best]
            assert [h.score for h in hypotheses] == pytest.approx([value for value, _ in expected], abs=1e-5)
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens in expected]
            changed += plain[sentence][0].tokens != hypotheses[0].tokens
    assert changed > 1


@pytest.mark.parametrize(("penalty", "score"), [(AVERAGE, CoverageScore(0.2)), (NO_LENGTH, LENGTH_SCORE)])
def test_the_search_goes_on_while_a_live_hypothesis_may_cover_more(penalty: Scorer, score: CoverageScore) -> None:
    model, limits = Attending(Toy(5, vocabulary=9), [4] * 12), Limits(0, [7] * 12)
    results = search(model, limits, 1, score, penalty, stop="exact")

    def covered(sentence: int, tokens: list[int], log_prob: float) -> float:
        return log_prob / penalty.penalty(len(tokens)) + model.covered(sentence, tokens, score)

    expected = [plain_beam(model.toy, limits, sentence, 3, covered, "exact")[0][0] for sentence in range(12)]
    assert [h.tokens for (h,) in results] == expected


def test_without_a_cap_coverage_normalises_the_length() -> None:
    model, limits = Attending(Toy(1, vocabulary=9), [4] * 30), Limits(0, [9] * 30)

    def mean_length(score: CoverageScore | None) -> float:
        results = search(model, limits, 1, score, NO_LENGTH, beam_size=6, stop="exact")
        return float(np.mean([len(h.tokens) for (h,) in results]))

    lengths = [mean_length(score) for score in (None, CoverageScore(2.0, 0.3), LENGTH_SCORE)]
    assert lengths == sorted(lengths)
    assert lengths[2] > lengths[1] + 0.5


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_mates_and_padding_change_no_bit(groups: int) -> None:
    maxima, lengths = [7, 3, 9, 6], [3, 11, 2, 7]
    model, padded = (Attending(Toy(3, vocabulary=70, coarse=groups > 1), lengths, padding) for padding in (0, 21))

    def found(which: Attending, sentences: list[int]) -> Any:  # noqa: ANN401
        limits = Limits(1, [maxima[sentence] for sentence in sentences])
        return bits(search(which, limits, 3, CoverageScore(0.4), sentences=sentences, beam_size=4, groups=groups))

    together = found(model, [0, 1, 2, 3])
    assert found(padded, [0, 1, 2, 3]) == together
    for order in itertools.islice(itertools.permutations(range(4)), 0, None, 7):
        assert found(model, list(order)) == [together[sentence] for sentence in order]
    for sentence, expected in enumerate(together):
        assert found(padded, [sentence]) == [expected]


def test_the_equation_of_coverage() -> None:
    sums = np.array([0.5, 1.0, 2.5, 0.25], np.float32)
    assert CoverageScore(0.2)(sums) == pytest.approx(0.2 * math.log(0.125))
    assert CoverageScore(0.2, 0.4, 1000.0)(sums) == pytest.approx(0.2 * math.log(0.5 * 2.5 * 0.4))
    assert CoverageScore(1.0)(np.array([0.0], np.float32)) == pytest.approx(math.log(1e-6))


def test_a_penalty_of_zero_changes_no_bit() -> None:
    model, limits = Attending(Toy(2, vocabulary=12), [3, 5, 2]), Limits(1, [7, 9, 5])
    batch, zero = batch_of(model, limits, lengths=[3, 5, 2]), Coverage(AVERAGE, CoverageScore(0.0, 0.2, 7.0), [3, 5, 2])
    plain = search(model, limits, 3, None, beam_size=4)
    assert bits(beam_search(batch, Selection(4, EOS), 3, scorer=zero)) == bits(plain)


def diverse(toy: Toy, limits: Limits, n: int, sentences: list[int], **changes: Any) -> list[list[Hypothesis]]:  # noqa: ANN401
    changes = {"length_penalty": "average", "alpha": 1.0} | changes
    return configured("beam", batch_of(toy, limits, sentences, forbidden=changes.pop("forbidden", None)), n, **changes)


def plain_groups(
    toy: Toy, limits: Limits, sentence: int, beam_size: int, groups: int, diversity: float, stop: str
) -> Scored:
    """Plain lists, one sentence: all groups side by side, each until its k best cannot change, or with "beam" until k
    of its hypotheses have ended."""
    k = beam_size // groups
    live: list[Scored] = [[([], 0.0)] for _ in range(groups)]
    finished: list[Scored] = [[] for _ in range(groups)]
    while any(live):
        taken: list[int] = []
        for group in range(groups):
            candidates = []
            for prefix, log_prob in live[group]:
                following = toy.next_log_probs(sentence, prefix)
                for token in allowed(len(prefix) + 1, limits, sentence, toy.vocabulary):
                    total = log_prob + following[token]
                    candidates.append((total - diversity * taken.count(token), [*prefix, token], total))
            candidates.sort(key=lambda candidate: -candidate[0])
            for _, tokens, total in candidates[:k]:
                if tokens[-1] == EOS:
                    finished[group].append((tokens, total / AVERAGE.penalty(len(tokens))))
            live[group] = [(tokens, total) for _, tokens, total in candidates if tokens[-1] != EOS][:k]
            # As in the search, a group chooses its words before it is known to be complete.
            taken += [tokens[-1] for tokens, _ in live[group]]
        for group in range(groups):
            best = sorted((score for _, score in finished[group]), reverse=True)[:k]
            highest = max((total for _, total in live[group]), default=-math.inf)
            bound = highest / AVERAGE.penalty(limits.max_lengths[sentence])
            if len(best) == k and (stop == "beam" or bound <= best[-1]):
                live[group] = []
    results: dict[tuple[int, ...], float] = {}
    for tokens, score in itertools.chain.from_iterable(sorted(f, key=lambda pair: -pair[1])[:k] for f in finished):
        results.setdefault(tuple(tokens), score)
    return [(list(tokens), score) for tokens, score in sorted(results.items(), key=lambda item: -item[1])]


@pytest.mark.parametrize(("beam_size", "groups"), [(2, 2), (6, 2), (6, 3), (5, 5)])
@pytest.mark.parametrize(("diversity", "stop"), [(0.0, "beam"), (0.3, "beam"), (2.0, "beam"), (2.0, "exact")])
def test_groups_search_as_plain_lists_do(beam_size: int, groups: int, diversity: float, stop: Stop) -> None:
    """And the number of translations that are returned changes none of them."""
    limits, options = Limits(1, [9, 5, 12]), {"beam_size": beam_size, "groups": groups, "diversity": diversity}
    for seed in range(2):
        toy = Toy(seed, vocabulary=9, bias={EOS: 1.0})
        results = diverse(toy, limits, beam_size, [0, 1, 2], stop=stop, **options)
        for sentence, hypotheses in enumerate(results):
            expected = plain_groups(toy, limits, sentence, beam_size, groups, diversity, stop)
            assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected]
            assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)
        first = diverse(toy, limits, 1, [0, 1, 2], stop=stop, **options)
        assert bits(first) == [hypotheses[:1] for hypotheses in bits(results)]


def test_a_group_goes_on_while_any_of_its_hypotheses_may_improve() -> None:
    """The first of a group need not be the most probable one."""
    for seed, sentence, size, groups, diversity in ((2, 5, 6, 3, 1.0), (2, 24, 8, 2, 3.0), (4, 26, 6, 3, 3.0)):
        toy, options = Toy(seed, vocabulary=9, bias={EOS: 0.0}), {"groups": groups, "diversity": diversity}
        (hypotheses,) = diverse(toy, Limits(0, [9]), size, [sentence], stop="exact", beam_size=size, **options)
        aligned = Limits(0, [9] * (sentence + 1))
        expected = plain_groups(toy, aligned, sentence, size, groups, diversity, "exact")
        assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected][:size]


@pytest.mark.parametrize("stop", ["beam", "exact"])
def test_groups_without_diversity_are_each_a_smaller_beam(stop: Stop) -> None:
    limits, sentences = Limits(1, [8, 1, 5, 8]), [0, 1, 2, 3]
    for seed in range(4):
        toy = Toy(seed, vocabulary=70, bias={EOS: 2.0}, coarse=seed % 2 == 1)
        small = diverse(toy, limits, 3, sentences, beam_size=3, stop=stop)
        assert bits(diverse(toy, limits, 12, sentences, beam_size=12, groups=4, diversity=0, stop=stop)) == bits(small)


def test_the_first_words_differ_if_the_penalty_is_large() -> None:
    toy = Toy(1, vocabulary=30, bias={EOS: -9.0})
    for sentence in range(6):
        (hypotheses,) = diverse(toy, Limits(0, [5]), 4, [sentence], beam_size=4, groups=4, diversity=1e3)
        assert len({h.tokens[0] for h in hypotheses}) == 4
        for h in hypotheses:  # what they are ranked by stays the model's
            assert h.log_prob == pytest.approx(toy.log_prob(sentence, h.tokens), abs=1e-5)
            assert h.score == h.log_prob / AVERAGE.penalty(len(h.tokens))


def test_prefixes_and_forbidden_phrases_hold_in_every_group() -> None:
    toy, limits = Toy(5, vocabulary=12), Limits(0, [8, 8], [[7, 8], [9]])
    forbidden = Forbidden.spelled(["ab", "cc"], {"a": 3, "b": 4, "c": 5}.get)
    options = {"beam_size": 6, "groups": 3, "diversity": 2.0}
    for prefix, hypotheses in zip(
        limits.prefixes, diverse(toy, limits, 6, [0, 1], forbidden=forbidden, **options), strict=True
    ):
        assert len(hypotheses) >= 4
        for h in hypotheses:
            assert h.tokens[: len(prefix)] == list(prefix)
            assert not {(3, 4), (5, 5)} & set(itertools.pairwise(h.tokens))
    free = diverse(toy, limits, 6, [0, 1], **options)
    assert any({(3, 4), (5, 5)} & set(itertools.pairwise(h.tokens)) for nbest in free for h in nbest)


PENALTY = Scorer("average", 0.7)


def grown(seed: int, beam: int, limits: Limits, n: int = 1) -> tuple[list[Hypothesis], list[list[Node]]]:
    recorder = Recorder(beam, EOS, PENALTY, None)
    batch = batch_of(Toy(seed, vocabulary=9), limits, [seed])
    (hypotheses,) = beam_search(batch, recorder, n, scorer=Coverage(PENALTY, CoverageScore(0.0), [3]))
    return hypotheses, recorder.steps


def path(steps: list[list[Node]], step: int, node: Node) -> list[int]:
    """The tokens from the root to a node, by its parents."""
    tokens = [node.token]
    while node.parent is not None:
        step -= 1
        node = steps[step][node.parent]
        tokens.insert(0, node.token)
    assert step == 0
    return tokens


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_paths_of_ended_nodes_are_the_hypotheses(beam: int) -> None:
    for seed in range(4):
        hypotheses, steps = grown(seed, beam, Limits(2, [8]), n=beam)
        nodes = [(step, node) for step, nodes in enumerate(steps) for node in nodes if node.fate == "ended"]
        ended = {tuple(path(steps, step, node)): node for step, node in nodes}
        assert hypotheses
        for hypothesis in hypotheses:
            node = ended[tuple(hypothesis.tokens)]
            assert node.log_prob == pytest.approx(hypothesis.log_prob, abs=1e-6)
            assert node.score == pytest.approx(hypothesis.score, abs=1e-6)
        assert max(node.score for node in ended.values()) == pytest.approx(hypotheses[0].score, abs=1e-6)


@pytest.mark.parametrize("beam", [1, 3])
def test_each_step_keeps_a_beam_of_the_best_candidates(beam: int) -> None:
    _, steps = grown(1, beam, Limits(0, [8]))
    toy = Toy(1, vocabulary=9)
    for step, nodes in enumerate(steps):
        kept = [node for node in nodes if node.fate == "kept"]
        assert [node.fate for node in nodes[: len(kept)]] == ["kept"] * len(kept)
        assert 0 < len(kept) <= beam or step == len(steps) - 1
        assert all(node.token != EOS for node in kept)
        pruned = [node.log_prob for node in nodes if node.fate == "pruned" and node.token != EOS]
        assert not pruned or max(pruned) <= min(node.log_prob for node in kept)
        for node in nodes:
            assert node.log_prob == pytest.approx(toy.log_prob(1, path(steps, step, node)), abs=1e-5)
            assert node.score == pytest.approx(node.log_prob / PENALTY.penalty(step + 1), abs=1e-6)
            assert (node.parent is None) == (step == 0)
            if node.parent is not None:
                assert steps[step - 1][node.parent].fate == "kept"


def test_a_prefix_is_the_only_branch_of_its_steps() -> None:
    _, steps = grown(3, 4, Limits(0, [8], [[5, 6]]))
    assert [[node.token for node in nodes] for nodes in steps[:2]] == [[5], [6]]
    assert len(steps[2]) > 1
