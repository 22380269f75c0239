"""The beam as a tree, against the hypotheses that the search returns."""

import pytest
from search_toy import CPU, EOS, SYMBOLS, Toy

from nmt.translate.search.beam import beam_search
from nmt.translate.search.hypothesis import Hypothesis, LengthPenalty, Limits
from nmt.translate.search.tree import BeamTree, Node

PENALTY = LengthPenalty("average", 0.7)


def grown(seed: int, beam: int, limits: Limits, n: int = 1) -> tuple[list[Hypothesis], BeamTree]:
    toy, tree = Toy(seed, vocabulary=9), BeamTree()
    (found,) = beam_search(
        toy.step, toy.start([seed]), SYMBOLS, limits, beam_size=beam, n_best=n, penalty=PENALTY, device=CPU, tree=tree
    )
    return found, tree


def path(tree: BeamTree, step: int, node: Node) -> list[int]:
    """The tokens from the root to a node, by its parents."""
    tokens = [node.token]
    while node.parent is not None:
        step -= 1
        node = tree.steps[step][node.parent]
        tokens.insert(0, node.token)
    assert step == 0
    return tokens


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_paths_of_ended_nodes_are_the_hypotheses(seed: int, beam: int) -> None:
    found, tree = grown(seed, beam, Limits(2, [8]), n=beam)
    ended = {
        tuple(path(tree, step, node)): node
        for step, nodes in enumerate(tree.steps)
        for node in nodes
        if node.fate == "ended"
    }
    assert found
    for hypothesis in found:
        node = ended[tuple(hypothesis.tokens)]
        assert node.log_prob == pytest.approx(hypothesis.log_prob, abs=1e-6)
        assert node.score == pytest.approx(hypothesis.score, abs=1e-6)
    assert max(node.score for node in ended.values()) == pytest.approx(found[0].score, abs=1e-6)


@pytest.mark.parametrize("beam", [1, 3])
def test_each_step_keeps_a_beam_of_the_best_candidates(beam: int) -> None:
    _, tree = grown(1, beam, Limits(0, [8]))
    toy = Toy(1, vocabulary=9)
    for step, nodes in enumerate(tree.steps):
        kept = [node for node in nodes if node.fate == "kept"]
        assert [node.fate for node in nodes[: len(kept)]] == ["kept"] * len(kept)
        assert 0 < len(kept) <= beam or step == len(tree.steps) - 1
        assert all(node.token != EOS for node in kept)
        pruned = [node.log_prob for node in nodes if node.fate == "pruned" and node.token != EOS]
        assert not pruned or max(pruned) <= min(node.log_prob for node in kept)
        for node in nodes:
            assert node.log_prob == pytest.approx(toy.log_prob(1, path(tree, step, node)), abs=1e-5)
            assert node.score == pytest.approx(node.log_prob / PENALTY(step + 1), abs=1e-6)
            assert (node.parent is None) == (step == 0)
            if node.parent is not None:
                assert tree.steps[step - 1][node.parent].fate == "kept"


def test_a_prefix_is_the_only_branch_of_its_steps() -> None:
    _, tree = grown(3, 4, Limits(0, [8], [[5, 6]]))
    assert [[node.token for node in nodes] for nodes in tree.steps[:2]] == [[5], [6]]
    assert len(tree.steps[2]) > 1
