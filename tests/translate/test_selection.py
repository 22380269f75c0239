"""The coverage penalty and the beam's tree: compared with plain loops, and consistent with the beam."""

import itertools
import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from search_toy import BOS, EOS, PENALTIES, Prefixes, Toy, batch_of, bits, enumerate_all
from search_toy import search as configured
from torch import Tensor

from nmt.model.seq2seq import StepOutput
from nmt.translate.beam import beam_search
from nmt.translate.search import Hypothesis, Limits
from nmt.translate.selection import Node, Scorer, TreeSelection

AVERAGE = Scorer("average", 1.0)


@dataclass
class Attending:
    """A toy whose attention depends on sentence and prefix, and is 0 on some tokens and on padding."""

    toy: Toy
    lengths: list[int]  # length of each sentence
    padding: int = 0  # number of padded positions after the end of the longest sentence

    def start(self, sentences: list[int]) -> Prefixes:
        return self.toy.start(sentences)

    def weights(self, sentence: int, prefix: list[int]) -> list[float]:
        """Return the weights of the step after the prefix."""
        code = reduce(lambda code, token: 31 * code + token, prefix, 7 * sentence)
        drawn = np.random.default_rng(code).random(self.lengths[sentence])
        sparse = np.where(drawn > 0.4, drawn**4, 0.0)
        return (sparse / max(sparse.sum(), 1e-9)).tolist()

    def step(self, tokens: Tensor, state: Prefixes) -> StepOutput[Prefixes]:
        output = self.toy.step(tokens, state)
        rows = zip(output.state.sentences.tolist(), output.state.tokens.tolist(), strict=True)
        weights = torch.zeros(len(tokens), max(self.lengths) + self.padding)
        for row, (sentence, prefix) in zip(weights, rows, strict=True):
            row[: self.lengths[sentence]] = torch.tensor(self.weights(sentence, prefix))
        return output._replace(weights=weights)

    def covered(self, sentence: int, tokens: list[int]) -> float:
        """Compute the coverage penalty by its definition."""
        sums = [0.0] * self.lengths[sentence]
        for step in range(len(tokens)):
            for position, weight in enumerate(self.weights(sentence, [BOS, *tokens[:step]])):
                sums[position] += weight
        return sum(math.log(min(max(total, 1e-6), 1.0)) for total in sums)


def search(
    model: Attending,
    limits: Limits,
    n_best: int,
    strength: float,
    penalty: Scorer = AVERAGE,
    sentences: list[int] | None = None,
    **changes: Any,  # noqa: ANN401
) -> list[list[Hypothesis]]:
    sentences = list(range(len(limits.max_lengths))) if sentences is None else sentences
    batch = batch_of(model, limits, sentences, lengths=[model.lengths[sentence] for sentence in sentences])
    changes |= {"length_penalty": penalty.kind, "alpha": penalty.alpha, "coverage_penalty": strength}
    return configured("beam", batch, n_best, **changes)


@pytest.mark.parametrize(("penalty", "n_best"), [(PENALTIES[0], 1), (PENALTIES[1], 5)])
def test_a_large_beam_finds_the_best_scores_of_all_hypotheses(penalty: Scorer, n_best: int) -> None:
    """Early stopping must not give up an unfinished hypothesis that could still win."""
    limits, changed = Limits(0, [4, 1, 3, 4]), 0
    for seed in range(2):
        model = Attending(Toy(seed), [3, 5, 2, 4])
        plain = search(model, limits, 1, 0.0, penalty, beam_size=100)
        for sentence, hypotheses in enumerate(search(model, limits, n_best, 0.3, penalty, beam_size=100)):
            every = enumerate_all(model.toy, limits, sentence)
            scored = [(p / penalty.penalty(len(t)) + 0.3 * model.covered(sentence, t), t) for t, p in every]
            expected = sorted(scored, reverse=True)[:n_best]
            assert [h.score for h in hypotheses] == pytest.approx([value for value, _ in expected], abs=1e-5)
            assert [h.tokens for h in hypotheses] == [tokens for _, tokens in expected]
            changed += plain[sentence][0].tokens != hypotheses[0].tokens
    assert changed > 1


def test_batch_mates_and_padding_change_no_bit() -> None:
    maxima, lengths = [7, 3, 9, 6], [3, 11, 2, 7]
    model, padded = (Attending(Toy(3, vocabulary=70), lengths, padding) for padding in (0, 21))

    def found(which: Attending, sentences: list[int]) -> Any:  # noqa: ANN401
        limits = Limits(1, [maxima[sentence] for sentence in sentences])
        return bits(search(which, limits, 3, 0.4, sentences=sentences, beam_size=4))

    together = found(model, [0, 1, 2, 3])
    assert found(padded, [0, 1, 2, 3]) == together
    for order in itertools.islice(itertools.permutations(range(4)), 0, None, 7):
        assert found(model, list(order)) == [together[sentence] for sentence in order]
    for sentence, expected in enumerate(together):
        assert found(padded, [sentence]) == [expected]


PENALTY = Scorer("average", 0.7)


def grown(seed: int, beam: int, limits: Limits, n: int = 1) -> tuple[list[Hypothesis], list[list[Node]]]:
    recorder = TreeSelection(beam, EOS, PENALTY, None)
    batch = batch_of(Toy(seed, vocabulary=9), limits, [seed])
    (hypotheses,) = beam_search(batch, recorder, n, scorer=PENALTY)
    return hypotheses, recorder.steps


def path(steps: list[list[Node]], step: int, node: Node) -> list[int]:
    """Return the tokens from the root to a node of step `step`."""
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
    _, steps = grown(3, 4, Limits(0, [8], [[5, 6]]))
    assert [[node.token for node in nodes] for nodes in steps[:2]] == [[5], [6]]  # a prefix is the only branch
    assert len(steps[2]) > 1
