"""Phrases that no search may generate, in any segmentation."""

import itertools

import pytest
from search_toy import BOS, CPU, EOS, NO_PENALTY, PAD, SYMBOLS, Toy, enumerate_all
from test_prefix import SEARCHES
from torch import Tensor, rand

from nmt.translate.search.beam import beam_search
from nmt.translate.search.forbidden import Forbidden
from nmt.translate.search.hypothesis import Hypothesis, Limits
from nmt.translate.search.rollout import SamplingOptions, greedy_search, sample

PIECES = {3: "▁a", 4: "b", 5: "▁ab", 6: "▁", 7: "a", 8: "▁b"}
PHRASES = ["▁ab▁a", "▁b"]


def spelled(phrases: list[str]) -> Forbidden:
    ids = {piece: token for token, piece in PIECES.items()}
    return Forbidden.spelled(phrases, ids.get)


def bad(tokens: list[int]) -> bool:
    """Whether some of the tokens, one after the other, spell a phrase."""
    tokens = [6, *tokens]  # a space before the first token makes no difference to the text
    runs = itertools.combinations(range(len(tokens) + 1), 2)
    return any("".join(PIECES.get(token, "|") for token in tokens[start:end]) in PHRASES for start, end in runs)


def search(kind: str, toy: Toy, limits: Limits, sentences: list[int], beam: int, n: int = 1) -> list[list[Hypothesis]]:
    forbidden = spelled(PHRASES)
    inputs = toy.step, toy.start(sentences), SYMBOLS._replace(banned=(PAD, BOS, *forbidden.always)), limits
    if kind == "greedy":
        return greedy_search(*inputs, penalty=NO_PENALTY, device=CPU, forbidden=forbidden)
    if kind == "beam":
        options = {"beam_size": beam, "n_best": n, "penalty": NO_PENALTY, "device": CPU}
        return beam_search(*inputs, **options, forbidden=forbidden)  # type: ignore[arg-type]

    def uniform(rows: Tensor) -> Tensor:
        return rand(len(rows))

    options = {"options": SamplingOptions(1.0, 0, 1.0, n), "penalty": NO_PENALTY, "device": CPU}
    return sample(*inputs, **options, uniform=uniform, forbidden=forbidden)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SEARCHES)
def test_no_hypothesis_contains_a_phrase(kind: str) -> None:
    toy = Toy(3, 9, bias={8: 3.0, 6: 1.0, 4: 1.0, EOS: -4.0})  # which otherwise would
    limits = Limits(0, [12] * 20)
    for nbest in search(kind, toy, limits, list(range(20)), beam=3, n=1 if kind == "greedy" else 3):
        for hypothesis in nbest:
            assert not bad(hypothesis.tokens)
    free = greedy_search(toy.step, toy.start(list(range(20))), SYMBOLS, limits, penalty=NO_PENALTY, device=CPU)
    assert any(bad(hypothesis.tokens) for (hypothesis,) in free)


def test_a_large_beam_finds_the_best_of_the_others() -> None:
    toy, limits = Toy(4, 9), Limits(0, [4])
    (found,) = search("beam", toy, limits, [0], beam=6**3, n=40)
    fitting = sorted((pair for pair in enumerate_all(toy, limits, 0) if not bad(pair[0])), key=lambda pair: -pair[1])
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in fitting[:40]]


def test_the_start_of_a_phrase_may_lie_in_the_prefix() -> None:
    toy = Toy(5, 9, bias={3: 9.0, EOS: -9.0})
    limits = Limits(0, [8], [[3, 4]])
    for kind in SEARCHES:
        ((found,),) = search(kind, toy, limits, [0], beam=1)
        assert found.tokens[:2] == [3, 4]
        assert not bad(found.tokens)


def test_tokens_contain_a_phrase_or_not() -> None:
    forbidden = spelled(PHRASES)
    assert forbidden.always == (8,)
    for length in range(1, 5):
        for tokens in itertools.product(PIECES, repeat=length):
            assert forbidden.contained(tokens) == bad(list(tokens)), tokens
