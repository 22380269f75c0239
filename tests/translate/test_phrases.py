"""Required and forbidden phrases, compared with all hypotheses of a toy model and with plain loops."""

import itertools
import math
import random
from collections import Counter
from functools import cache
from typing import Literal

import numpy as np
import pytest
from search_toy import EOS, NO_PENALTY, Toy, batch_of, bits, enumerate_all
from search_toy import search as configured

from nmt.translate.beam import beam_search
from nmt.translate.constraints import Allocation, Automata, allocate_slots, occurrences
from nmt.translate.forbidden import Forbidden, kind_of
from nmt.translate.search import Guidance, Hypothesis, Limits
from nmt.translate.selection import Candidates, Scorer, Selection

SPACE = "▁"
Phrases = list[list[int]]
VOCABULARY = 7
CONTINUES = 6  # the only token that continues a word
LARGE = 4**4  # a beam that holds all hypotheses of at most 5 tokens
BOUNDARY = np.array([token != CONTINUES for token in range(VOCABULARY)])
# One phrase; repeated and overlapping phrases; a phrase that starts or is inside another one; a word of two tokens;
# no phrase.
CASES: list[Phrases] = [
    [[3]],
    [[3, 4]],
    [[3], [3]],
    [[3, 3], [3, 3]],
    [[3, 4], [4, 5]],
    [[3], [3, 4]],
    [[4], [3, 4, 5]],
    [[3, 3, 4], [3, 4]],
    [[3, 6]],
    [[3], [3, 6]],
    [[5], [4], [3]],
    [],
]


def words(tokens: list[int]) -> list[tuple[int, ...]]:
    """Group tokens into words: a token and those that continue it."""
    found: list[tuple[int, ...]] = []
    for token in tokens:
        if token == CONTINUES and found:
            found[-1] += (token,)
        else:
            found.append((token,))
    return found


def meets(tokens: list[int], phrases: Phrases) -> bool:
    """Return whether each phrase occurs as whole words, without overlap, at least as often as it is listed."""
    for phrase, times in Counter(map(tuple, phrases)).items():
        wanted, given, count, start = words(list(phrase)), words(tokens[:-1]), 0, 0
        while start + len(wanted) <= len(given):
            found = given[start : start + len(wanted)] == wanted
            count, start = count + found, start + (len(wanted) if found else 1)
        if count < times:
            return False
    return True


@cache
def hypotheses(seed: int) -> list[tuple[list[int], float]]:
    """List all hypotheses of at most 5 tokens for sentence 0."""
    return list(enumerate_all(Toy(seed, VOCABULARY), Limits(0, [5]), 0))


def search(
    toy: Toy,
    limits: Limits,
    constraints: list[Phrases],
    beam: int,
    n: int = 1,
    penalty: Scorer = NO_PENALTY,
    sentences: list[int] | None = None,
    forbidden: Forbidden | None = None,
) -> list[list[Hypothesis]]:
    guidance = Guidance(constraints=constraints, boundary=BOUNDARY)
    batch = batch_of(toy, limits, sentences, forbidden=forbidden, guidance=guidance)
    return configured("beam", batch, n, beam_size=beam, length_penalty=penalty.kind, alpha=penalty.alpha)


@pytest.mark.parametrize("penalty", [NO_PENALTY, Scorer("average", 1.0)])
def test_a_large_beam_finds_the_best_that_meets_all(penalty: Scorer) -> None:
    cases = [phrases for phrases in CASES if sum(map(len, phrases)) < 5]
    toy, limits = Toy(5, VOCABULARY), Limits(0, [5] * len(cases))
    found = search(toy, limits, cases, LARGE, n=3, penalty=penalty, sentences=[0] * len(cases))
    everything = hypotheses(5)
    for nbest, phrases in zip(found, cases, strict=True):
        fitting = [(t, log_prob / penalty.penalty(len(t))) for t, log_prob in everything if meets(t, phrases)]
        best = sorted(fitting, key=lambda pair: -pair[1])[:3]
        assert [hypothesis.tokens for hypothesis in nbest] == [tokens for tokens, _ in best]
        assert [hypothesis.score for hypothesis in nbest] == pytest.approx([score for _, score in best], abs=1e-5)


@pytest.mark.parametrize(("beam", "seed"), [(1, 0), (2, 1), (5, 2), (5, 3)])
def test_small_beams_meet_all_just_within_the_limit(beam: int, seed: int) -> None:
    """The length limit just fits the phrases one after the other and </s>, and the model makes them improbable."""
    toy = Toy(seed, VOCABULARY, bias={3: -9.0, 4: -5.0, EOS: 4.0, CONTINUES: 6.0})
    lengths = [sum(map(len, phrases)) + 1 for phrases in CASES]
    for spare in (0, 1, 4):
        found = search(toy, Limits(0, [length + spare for length in lengths]), CASES, beam, n=beam)
        for sentence, (nbest, phrases) in enumerate(zip(found, CASES, strict=True)):
            assert nbest
            for hypothesis in nbest:
                assert meets(hypothesis.tokens, phrases), (phrases, hypothesis.tokens)
                assert hypothesis.log_prob == pytest.approx(toy.log_prob(sentence, hypothesis.tokens), abs=1e-3)
            assert len({tuple(hypothesis.tokens) for hypothesis in nbest}) == len(nbest)


@pytest.mark.parametrize("stop", ["beam", "exact"])
def test_without_constraints_it_is_the_plain_search(stop: Literal["beam", "exact"]) -> None:
    """The results have the same bits, although the search proposes further candidates."""
    batch, scorer = batch_of(Toy(3, 90), Limits(2, [9, 5, 12])), Scorer("average", 1.0)
    allocation = Allocation(4, EOS, [[], [], []], np.ones(90, np.bool_))
    plain, allocated = (beam_search(batch, s, 4, scorer=scorer, stop=stop) for s in (Selection(4, EOS), allocation))
    assert bits(allocated) == bits(plain)


def test_a_hypothesis_that_lacks_a_phrase_does_not_keep_the_search_going() -> None:
    allocation = Allocation(2, EOS, [[(5,)]], np.ones(9, np.bool_))
    log_probs, tokens = np.array([[-1.0, -2.0]], np.float32), np.array([[6, 5]])
    _, live = allocation.choose(Candidates(log_probs, np.zeros_like(tokens), tokens))
    assert live.tokens.tolist() == [[6, 5]]
    assert allocation.rivals(live).tolist() == [[-math.inf, -2.0]]


def test_batch_mates_and_chunks_change_nothing() -> None:
    toy, limits = Toy(7, VOCABULARY), Limits(0, [8] * len(CASES))
    batch = batch_of(toy, limits)
    together, chunks = (
        beam_search(batch, Allocation(3, EOS, CASES, BOUNDARY), 2, scorer=Scorer(), cached_numbers=numbers)
        for numbers in (2**20, 1)
    )
    assert bits(chunks) == bits(together)
    for sentence, phrases in enumerate(CASES):
        alone = search(toy, Limits(0, [8]), [phrases], beam=3, n=2, sentences=[sentence])
        assert bits(alone) == bits([together[sentence]])


def test_a_prefix_counts_and_the_rest_follows() -> None:
    toy, prefix = Toy(2, VOCABULARY), [4, 3]
    for phrases in ([[3, 5]], [[4, 3]], [[5], [3]]):
        limits = Limits(0, [5], [prefix])
        ((found,),) = search(toy, limits, [phrases], LARGE)
        fitting = [pair for pair in hypotheses(2) if pair[0][:2] == prefix and meets(pair[0], phrases)]
        assert found.tokens == max(fitting, key=lambda pair: pair[1])[0]


def test_an_automaton_counts_as_plain_loops_do() -> None:
    draw = random.Random(1)
    for _ in range(300):
        phrase = [draw.choice([3, 4, CONTINUES]) for _ in range(draw.randint(1, 4))]
        phrase[0] = draw.choice([3, 4])
        times = draw.randint(1, 3)
        tokens = draw.choices([3, 4, 5, CONTINUES], k=12)
        if draw.random() < 0.5:  # the phrase may be followed by a token that continues its last word, and occur later
            phrase, tokens = [3, CONTINUES, 3], draw.choices([3, CONTINUES], k=8)
        automata = Automata([[phrase] * times], BOUNDARY)
        states = automata.roots[:, None]
        for token in tokens:
            states = automata.after(states, np.array([[token]]))
        met = occurrences(tokens, phrase, BOUNDARY)
        assert bool(automata.satisfied[states].all()) == (met >= times), (phrase, times, tokens)
        assert (met >= times) == meets([*tokens, EOS], [phrase] * times)


@pytest.mark.parametrize(
    ("banks", "total", "size", "expected"),  # -1: an impossible candidate
    [
        ([0, 0, 0, 0, 0, 1, 0, 2], 2, 6, [0, 1, 2, 3, 5, 7]),  # bank 0 takes what banks 1 and 2 leave
        ([0, 0, 1, 1], 2, 3, [0, 2, 3]),  # bank 1 takes what bank 2 leaves
        ([-1, 0, 1, 1, 1, 1], 1, 4, [1, 2, 3, 4]),  # bank 1 takes what bank 0 leaves
    ],
)
def test_slots_are_shared_by_banks(banks: list[int], total: int, size: int, expected: list[int]) -> None:
    given = np.array([banks])
    found = allocate_slots(np.maximum(given, 0), given >= 0, np.array([total]), size)
    assert found.tolist() == [expected]


def test_forbidden_and_required_phrases_together() -> None:
    toy, limits = Toy(8, VOCABULARY), Limits(0, [5])
    forbidden = Forbidden(["▁a▁c", "▁a▁b▁a", "▁d"], {"▁a": 3, "▁b": 4, "▁c": 5, "▁d": 6})
    phrases = [[3], [4]]
    (found,) = search(toy, limits, [phrases], LARGE, n=4, forbidden=forbidden)
    fitting = [pair for pair in hypotheses(8) if meets(pair[0], phrases)]
    fitting = [pair for pair in fitting if not any(part in str(pair[0]) for part in ("3, 5", "3, 4, 3", "6"))]
    best = sorted(fitting, key=lambda pair: -pair[1])[:4]
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in best]


PIECES = {3: "▁a", 4: "b", 5: "▁ab", 6: "▁", 7: "a", 8: "▁b"}
PHRASES = ["▁ab▁a", "▁b"]
FORBIDDEN = Forbidden(PHRASES, {piece: token for token, piece in PIECES.items()})


def bad(tokens: list[int]) -> bool:
    """Return whether successive tokens spell a forbidden phrase."""
    tokens = [6, *tokens]  # a space before the first token makes no difference to the text
    runs = itertools.combinations(range(len(tokens) + 1), 2)
    return any("".join(PIECES.get(token, "|") for token in tokens[start:end]) in PHRASES for start, end in runs)


@pytest.mark.parametrize("kind", ["greedy", "beam", "sampling"])
def test_no_hypothesis_contains_a_phrase(kind: str) -> None:
    toy = Toy(3, 9, bias={8: 3.0, 6: 1.0, 4: 1.0, EOS: -4.0})  # without the rule, its hypotheses contain phrases
    limits, n = Limits(0, [12] * 20), 1 if kind == "greedy" else 3
    for nbest in configured(kind, batch_of(toy, limits, forbidden=FORBIDDEN), n):
        assert not any(bad(hypothesis.tokens) for hypothesis in nbest)
    assert any(bad(hypothesis.tokens) for (hypothesis,) in configured("greedy", batch_of(toy, limits)))
    assert FORBIDDEN.always == (8,)
    # The start of a phrase may lie in the prefix.
    toy = Toy(5, 9, bias={3: 9.0, EOS: -9.0})
    ((hypothesis,),) = configured(kind, batch_of(toy, Limits(0, [8], [[3, 4]]), forbidden=FORBIDDEN))
    assert hypothesis.tokens[:2] == [3, 4]
    assert not bad(hypothesis.tokens)


def test_a_large_beam_finds_the_best_without_a_phrase() -> None:
    toy, limits = Toy(4, 9), Limits(0, [4])
    (found,) = configured("beam", batch_of(toy, limits, forbidden=FORBIDDEN), 40, beam_size=6**3)
    fitting = sorted((pair for pair in enumerate_all(toy, limits, 0) if not bad(pair[0])), key=lambda pair: -pair[1])
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in fitting[:40]]


def plainly_contained(text: str, ends: set[int], phrase: str) -> bool:
    """Search a phrase at each position of a text, whose pieces end at `ends`."""
    after_sign = {i for i in range(1, len(text)) if kind_of(text[i - 1]) == "."}
    for start in range(len(text)):
        for spelled in [phrase] + [phrase[1:]] * (phrase[0] == "▁" and start in after_sign):
            end = start + len(spelled)
            whole = phrase[0] != "▁" or end in ends or kind_of(text[end : end + 1] or " ") == "."
            if spelled and text.startswith(spelled, start) and whole:
                return True
    return False


@pytest.mark.parametrize("letters", ["国民▁", "国民中", "ab▁", "a▁.", "犬a▁.", "犬鳥▁-"])
def test_phrases_are_found_as_by_a_plain_search(letters: str) -> None:
    draw = random.Random(1)

    def text(longest: int) -> str:
        return "".join(draw.choices(letters, k=draw.randint(1, longest)))

    found = []
    for _ in range(800):
        vocabulary = {piece: token for token, piece in enumerate(dict.fromkeys(text(4) for _ in range(6)))}
        starts = [SPACE if letters[0] < "z" else draw.choice(["", SPACE, letters[0]]) for _ in range(3)]
        phrases = [start + text(3).replace(SPACE * 2, SPACE) for start in starts[: draw.randint(1, 3)]]
        phrases = [phrase for phrase in phrases if (phrase[1:] and phrase[0] == SPACE) or kind_of(phrase[0]) == "c"]
        pieces = draw.choices(list(vocabulary), k=draw.randint(1, 6))
        ends = {1 + end for end in itertools.accumulate(map(len, pieces))}
        expected = any(plainly_contained("".join(["▁", *pieces]), ends, phrase) for phrase in phrases)
        forbidden, tokens = Forbidden(phrases, vocabulary), [vocabulary[piece] for piece in pieces]
        assert forbidden.contained(tokens) == expected, (phrases, pieces)
        smaller = forbidden.within(np.arange(len(vocabulary))[::-1])  # the same, with the token numbers of a shortlist
        assert smaller.contained([len(vocabulary) - 1 - token for token in tokens]) == expected, (phrases, pieces)
        found.append(expected)
    assert 0.1 < sum(found) / len(found) < 0.9
