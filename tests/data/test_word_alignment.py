from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmt.data.word_alignment import (
    AlignmentScores,
    Link,
    alignment_error_rate,
    attention_to_links,
    format_pharaoh,
    merge_to_words,
    parse_pharaoh,
    words_of_pieces,
)

LINKS = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)
GOLD = st.tuples(LINKS, LINKS).map(lambda pair: (pair[0], pair[0] | pair[1]))  # (sure links, possible links)
PIECES = st.lists(st.sampled_from(["▁", "▁ab", "cd", "e", "</s>", "."]), min_size=1, max_size=10)


def attention(targets: int, sources: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(sources), size=targets)


@settings(max_examples=30)
@given(GOLD)
def test_pharaoh_round_trip(gold: tuple[set[Link], set[Link]]) -> None:
    sure, possible = gold
    assert parse_pharaoh(format_pharaoh(sure)) == (sure, sure)
    assert format_pharaoh(sure | {(10, 0), (9, 11)}).endswith("9-11 10-0")  # sorted by number
    only_possible = format_pharaoh(possible - sure).replace("-", "p")
    assert parse_pharaoh(f"{format_pharaoh(sure)} {only_possible}\n") == (sure, possible)


@pytest.mark.parametrize("token", ["1", "1-", "-1", "1--2", "1:2", "a-b", "1p2p3", "1-2,", "٣-1", "1P2"])
def test_bad_pharaoh_token_is_named(token: str) -> None:
    with pytest.raises(ValueError, match="expected 3-4") as error:
        parse_pharaoh(f"0-0 {token} 1p1")
    assert repr(token) in str(error.value)


@settings(max_examples=30)
@given(st.lists(st.tuples(LINKS, GOLD), max_size=4))
def test_error_rate_by_definition(corpus: list[tuple[set[Link], tuple[set[Link], set[Link]]]]) -> None:
    # Pair each link with the number of its sentence, as if the corpus were one large sentence.
    proposed = {(n, link) for n, (links, _) in enumerate(corpus) for link in links}
    sure = {(n, link) for n, (_, gold) in enumerate(corpus) for link in gold[0]}
    possible = {(n, link) for n, (_, gold) in enumerate(corpus) for link in gold[1]}
    in_sure = sum(link in sure for link in proposed)
    in_possible = sum(link in possible for link in proposed)
    scores = alignment_error_rate((links for links, _ in corpus), (gold for _, gold in corpus))
    if proposed or sure:
        assert scores.aer == pytest.approx(1 - (in_sure + in_possible) / (len(proposed) + len(sure)))
    if proposed:
        assert scores.precision == pytest.approx(in_possible / len(proposed))
    if sure:
        assert scores.recall == pytest.approx(in_sure / len(sure))
    assert all(0 <= value <= 1 for value in (scores.aer, scores.precision, scores.recall))


def test_empty_sets() -> None:
    link = {(0, 0)}
    assert alignment_error_rate([], []) == AlignmentScores(aer=0, precision=1, recall=1)
    assert alignment_error_rate([set()], [(link, link)]) == AlignmentScores(aer=1, precision=1, recall=0)
    assert alignment_error_rate([link], [(set(), set())]) == AlignmentScores(aer=1, precision=0, recall=1)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], []),
        (["▁the", "▁car"], [0, 1]),
        (["▁agree", "ment", "▁on"], [0, 0, 1]),
        (["agree", "ment", "▁on"], [0, 0, 1]),
        (["▁", "ab", "c", "▁", "d"], [0, 0, 0, 1, 1]),
        (["▁a", "▁", "▁b", "</s>"], [0, 1, 1, 2]),
        (["▁a", "▁", "</s>"], [0, 1, 1]),
        (["▁a", "b", "</s>"], [0, 0, 1]),
        (["▁a", "</s>", "b", "c"], [0, 1, 2, 2]),
        (["</s>", "</s>"], [0, 1]),
        # An unknown piece counts as a word by itself.
        (["▁the", "<unk>", "▁sat", "<unk>", "▁water"], [0, 1, 2, 3, 4]),
        (["▁", "a", "<unk>", "b"], [0, 0, 1, 2]),
        (["▁", "<unk>", "</s>"], [0, 0, 1]),
        (["▁the", "▁zebra▁finch", "▁sat", "</s>"], [0, 1, 3, 4]),
    ],
)
def test_words_of_pieces(pieces: list[str], words: list[int]) -> None:
    assert words_of_pieces(pieces) == words


@settings(max_examples=30)
@given(PIECES, PIECES, st.integers(0, 99))
def test_merging_by_definition(target: list[str], source: list[str], seed: int) -> None:
    weights = attention(len(target), len(source), seed)
    target_words, source_words = words_of_pieces(target), words_of_pieces(source)
    merged = merge_to_words(weights, target, source)
    assert merged.shape == (max(target_words) + 1, max(source_words) + 1)
    for (row, column), weight in np.ndenumerate(merged):
        rows = [weights[t] for t, word in enumerate(target_words) if word == row]
        sums = [sum(w for w, word in zip(r, source_words, strict=True) if word == column) for r in rows]
        assert weight == pytest.approx(sum(sums) / len(sums))
    assert merged.sum(1) == pytest.approx(1)


def peaked(heaviest: Sequence[int], sources: int) -> np.ndarray:
    """Make rows of weights that sum to 1, with their maximum at the given columns."""
    return 0.1 / sources + 0.9 * np.eye(sources)[list(heaviest)]


@pytest.mark.parametrize(
    ("weights", "target", "source", "links"),
    [
        (peaked([0, 2, 2, 1, 3], 4), "▁la ▁voit ure ▁rouge </s>", "▁the ▁red ▁car </s>", {(0, 0), (2, 1), (1, 2)}),
        (peaked([2, 1, 0], 3), "▁c ▁d </s>", "▁a ▁b </s>", {(1, 1)}),  # ▁c attends to </s>, and </s> to ▁a
        (peaked([0, 1], 3), "▁c ▁d", "▁a ▁b </s>", {(0, 0), (1, 1)}),  # a hypothesis that was cut short
        (np.array([[0.3, 0.3, 0.4, 0.0]]), "▁x", "▁a b ▁c </s>", {(0, 0)}),  # the pieces of a word win together
        # The first of equal weights wins, and a word without weight has no link.
        (np.array([[0.2, 0.4, 0.4, 0], [0, 0.1, 0.9, 0], [0] * 4]), "▁x ▁y ▁z", "▁a ▁b ▁c </s>", {(1, 0), (2, 1)}),
    ],
)
def test_links_between_words(weights: np.ndarray, target: str, source: str, links: set[Link]) -> None:
    assert attention_to_links(weights, target.split(), source.split()) == links
