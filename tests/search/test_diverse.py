"""Diverse beam search against plain lists, and the laws that tie it to beam search."""

import itertools
import math
from typing import Any, Literal

import pytest
import torch
from search_toy import CPU, EOS, SYMBOLS, Toy, allowed

from nmt.translate.search.beam import beam_search
from nmt.translate.search.constrained import Allocation
from nmt.translate.search.diverse import Groups
from nmt.translate.search.forbidden import Forbidden
from nmt.translate.search.hypothesis import Hypothesis, LengthPenalty, Limits
from nmt.translate.search.tree import BeamTree

AVERAGE = LengthPenalty("average", 1.0)
Found = list[tuple[list[int], float]]
Stop = Literal["beam", "exact"]


def search(toy: Toy, limits: Limits, sentences: list[int], **options: Any) -> list[list[Hypothesis]]:  # noqa: ANN401
    options = {"penalty": AVERAGE, "n_best": 1, **options}
    return beam_search(toy.step, toy.start(sentences), SYMBOLS, limits, device=CPU, **options)


def reference(
    toy: Toy, limits: Limits, sentence: int, beam_size: int, groups: int, diversity: float, stop: Stop
) -> Found:
    """Plain lists, one sentence: all groups side by side, each until its k best cannot change, or with "beam" until k
    of its hypotheses have ended."""
    k = beam_size // groups
    live: list[Found] = [[([], 0.0)] for _ in range(groups)]
    finished: list[Found] = [[] for _ in range(groups)]
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
                    finished[group].append((tokens, total / AVERAGE(len(tokens))))
            live[group] = [(tokens, total) for _, tokens, total in candidates if tokens[-1] != EOS][:k]
            # As in the search, a group chooses its words before it is known to be complete.
            taken += [tokens[-1] for tokens, _ in live[group]]
        for group in range(groups):
            best = sorted((score for _, score in finished[group]), reverse=True)[:k]
            bound = max((total for _, total in live[group]), default=-math.inf) / AVERAGE(limits.max_lengths[sentence])
            if len(best) == k and (stop == "beam" or bound <= best[-1]):
                live[group] = []
    found: dict[tuple[int, ...], float] = {}
    for tokens, score in itertools.chain.from_iterable(sorted(f, key=lambda pair: -pair[1])[:k] for f in finished):
        found.setdefault(tuple(tokens), score)
    return [(list(tokens), score) for tokens, score in sorted(found.items(), key=lambda item: -item[1])]


@pytest.mark.parametrize(("beam_size", "groups"), [(2, 2), (4, 2), (6, 2), (6, 3), (9, 3), (5, 5)])
@pytest.mark.parametrize(("diversity", "stop"), [(0.0, "beam"), (0.3, "beam"), (2.0, "beam"), (2.0, "exact")])
def test_the_search_is_that_of_plain_lists(beam_size: int, groups: int, diversity: float, stop: Stop) -> None:
    limits = Limits(1, [9, 5, 12])
    for seed in range(3):
        toy = Toy(seed, vocabulary=9, bias={EOS: 1.0})
        options = {"beam_size": beam_size, "n_best": beam_size, "groups": Groups(groups, diversity, beam_size)}
        options["stop"] = stop
        for sentence, hypotheses in enumerate(search(toy, limits, [0, 1, 2], **options)):
            expected = reference(toy, limits, sentence, beam_size, groups, diversity, stop)
            assert [h.tokens for h in hypotheses] == [tokens for tokens, _ in expected]
            assert [h.score for h in hypotheses] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_a_group_goes_on_while_any_of_its_hypotheses_may_improve() -> None:
    """The first of a group need not be the most probable one."""
    for seed, sentence, beam_size, groups, diversity in ((2, 5, 6, 3, 1.0), (2, 24, 8, 2, 3.0), (4, 26, 6, 3, 3.0)):
        toy, limits = Toy(seed, vocabulary=9, bias={EOS: 0.0}), Limits(0, [9])
        options = {"beam_size": beam_size, "n_best": beam_size, "groups": Groups(groups, diversity, beam_size)}
        (found,) = search(toy, limits, [sentence], **options, stop="exact")
        aligned = Limits(0, [9] * (sentence + 1))
        expected = reference(toy, aligned, sentence, beam_size, groups, diversity, "exact")
        assert [h.tokens for h in found] == [tokens for tokens, _ in expected][:beam_size]


def test_the_number_of_translations_changes_none() -> None:
    toy, limits = Toy(1, vocabulary=9), Limits(0, [9] * 30)
    options = {"beam_size": 6, "groups": Groups(3, 2.0, 6), "stop": "exact"}
    every = bits(search(toy, limits, list(range(30)), n_best=6, **options))
    for n_best in (1, 2, 4):
        found = bits(search(toy, limits, list(range(30)), n_best=n_best, **options))
        assert found == [hypotheses[:n_best] for hypotheses in every]


def bits(found: list[list[Hypothesis]]) -> list[list[tuple[list[int], float, float, list[float]]]]:
    return [[(h.tokens, h.score, h.log_prob, h.token_log_probs) for h in hypotheses] for hypotheses in found]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("stop", ["beam", "exact"])
def test_groups_without_diversity_are_each_a_smaller_beam(stop: Stop, coarse: bool) -> None:
    limits = Limits(1, [8, 1, 5, 8])
    for seed in range(5):
        toy = Toy(seed, vocabulary=70, bias={EOS: 2.0}, coarse=coarse)
        small = search(toy, limits, [0, 1, 2, 3], beam_size=3, n_best=3, stop=stop)
        groups = Groups(4, 0.0, 12)
        found = search(toy, limits, [0, 1, 2, 3], beam_size=12, n_best=12, stop=stop, groups=groups)
        assert bits(found) == bits(small)


@pytest.mark.parametrize("stop", ["beam", "exact"])
def test_one_group_is_beam_search(stop: Stop) -> None:
    limits, toy = Limits(0, [8, 3, 6]), Toy(3, vocabulary=70, bias={EOS: 2.0})
    for n_best in (1, 4):
        plain = search(toy, limits, [0, 1, 2], beam_size=4, n_best=n_best, stop=stop)
        one = Groups(1, 0.7, 4)
        assert bits(search(toy, limits, [0, 1, 2], beam_size=4, n_best=n_best, stop=stop, groups=one)) == bits(plain)


def test_batch_mates_change_no_bit() -> None:
    maxima = [7, 3, 10, 1, 6]
    toy = Toy(3, vocabulary=70, bias={EOS: 2.0}, coarse=True)
    options = {"beam_size": 6, "n_best": 6, "groups": Groups(3, 0.6, 6)}
    together = bits(search(toy, Limits(1, maxima), [0, 1, 2, 3, 4], **options))
    for order in itertools.islice(itertools.permutations(range(5)), 0, None, 17):
        limits = Limits(1, [maxima[sentence] for sentence in order])
        assert bits(search(toy, limits, list(order), **options)) == [together[sentence] for sentence in order]


def test_the_first_words_differ_if_the_penalty_is_large() -> None:
    toy = Toy(1, vocabulary=30, bias={EOS: -9.0})
    for sentence in range(6):
        options = {"beam_size": 4, "n_best": 4, "groups": Groups(4, 1e3, 4)}
        (found,) = search(toy, Limits(0, [5]), [sentence], **options)
        assert len({h.tokens[0] for h in found}) == 4
        for h in found:  # what they are ranked by stays the model's
            assert h.log_prob == pytest.approx(toy.log_prob(sentence, h.tokens), abs=1e-5)
            assert h.score == h.log_prob / AVERAGE(len(h.tokens))


def test_prefixes_and_forbidden_phrases_hold_in_every_group() -> None:
    toy = Toy(5, vocabulary=12)
    pieces = {"a": 3, "b": 4, "c": 5}
    options = {"beam_size": 6, "n_best": 6, "groups": Groups(3, 2.0, 6)}
    limits = Limits(0, [8, 8], [[7, 8], [9]])
    for prefix, hypotheses in zip(
        limits.prefixes,
        search(toy, limits, [0, 1], **options, forbidden=Forbidden.spelled(["ab", "cc"], pieces.get)),
        strict=True,
    ):
        assert len(hypotheses) >= 4
        for h in hypotheses:
            assert h.tokens[: len(prefix)] == list(prefix)
            assert not {(3, 4), (5, 5)} & set(itertools.pairwise(h.tokens))
    free = search(toy, limits, [0, 1], **options)
    assert any({(3, 4), (5, 5)} & set(itertools.pairwise(h.tokens)) for nbest in free for h in nbest)


def test_impossible_hypotheses_are_not_returned() -> None:
    toy = Toy(9, bias={4: -math.inf, 5: -math.inf})
    (found,) = search(toy, Limits(1, [4]), [0], beam_size=8, n_best=8, groups=Groups(2, 0.5, 8))
    assert sorted(h.tokens for h in found) == [[3, EOS], [3, 3, EOS], [3, 3, 3, EOS]]
    assert search(toy, Limits(0, []), [], beam_size=4, groups=Groups(2, 0.5, 4)) == []
    broken = Toy(0, bias={token: math.nan for token in range(6)})
    assert search(broken, Limits(0, [4]), [0], beam_size=4, groups=Groups(2, 0.5, 4)) == [[]]


def test_what_has_no_meaning_is_refused() -> None:
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"{count} groups do not divide a beam of 4"):
            Groups(count, 0.5, 4)
    with pytest.raises(ValueError, match=r"the diversity is -1\.0"):
        Groups(2, -1.0, 4)
    allocation = Allocation([[[3]]], torch.ones(6, dtype=torch.bool).numpy(), EOS, 4)
    for options in ({"tree": BeamTree()}, {"allocation": allocation}):
        with pytest.raises(ValueError, match="neither an allocation nor a tree"):
            search(Toy(0), Limits(0, [4]), [0], beam_size=4, groups=Groups(2, 0.5, 4), **options)
