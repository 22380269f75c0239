"""What the page computes itself: words of sub-words, and the words in which two translations differ."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from served_page import Page, served_page

from nmt.data.word_alignment import merge_to_words, words, words_of_pieces

PIECES = [
    ["▁Un", "▁cha", "peau", "</s>"],
    ["<unk>", "▁", "a", "▁b▁c", "d", "</s>", "e"],
    ["▁日本", "語", "の", "文", "</s>"],
    ["▁", "<unk>", "x", "</s>"],
    ["</s>"],
]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with served_page() as page:
        page.open()
        yield page


def called(page: Page, module: str, expression: str, *values: object) -> Any:  # noqa: ANN401
    """The expression's value, of the module `m` and the values `v`."""
    script = f"const v = [...arguments], done = v.pop(); import('/static/{module}').then(m => done({expression}))"
    return page.chrome.execute_async_script(script, *values)


@pytest.mark.parametrize("target", PIECES)
@pytest.mark.parametrize("source", PIECES[:3])
def test_words_are_merged_as_the_metrics_do(page: Page, target: list[str], source: list[str]) -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(len(source)), len(target))
    merged = called(page, "words.js", "m.mergeToWords(...v)", weights.tolist(), target, source)
    np.testing.assert_allclose(merged, merge_to_words(weights, target, source))
    assert called(page, "words.js", "m.wordsOfPieces(...v)", target) == words_of_pieces(target)
    assert called(page, "words.js", "m.wordTexts(...v)", target) == words(target)


def longest(a: str, b: str) -> int:
    """The length of the longest common subsequence, by its definition."""

    @cache
    def rest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return 1 + rest(i + 1, j + 1) if a[i] == b[j] else max(rest(i + 1, j), rest(i, j + 1))

    return rest(0, 0)


def test_what_is_not_marked_is_the_longest_common_subsequence(page: Page) -> None:
    random = np.random.default_rng(2)
    pairs = [["".join(random.choice(list("abc"), size)) for size in random.integers(0, 12, 2)] for _ in range(50)]
    marks = called(page, "diff.js", "v[0].map(([a, b]) => m.differences([...a], [...b]))", pairs)
    for (a, b), (of_a, of_b) in zip(pairs, marks, strict=True):
        common = [[letter for letter, mark in zip(*each, strict=True) if not mark] for each in ((a, of_a), (b, of_b))]
        assert common[0] == common[1]
        assert len(common[0]) == longest(a, b)


def test_texts_are_compared_by_words_also_without_spaces(page: Page) -> None:
    assert called(page, "diff.js", "m.parts(...v)", "un petit  chien.") == ["un ", "petit  ", "chien."]
    parts = called(page, "diff.js", "m.parts(...v)", "小さい犬が家を見る")
    assert len(parts) > 3
    assert "".join(parts) == "小さい犬が家を見る"


def test_probabilities_are_short_and_never_another_number(page: Page) -> None:
    shown = called(page, "dom.js", "v[0].map(m.probability)", [1, 0.9961, 0.72, 0.0523, 0.00104, 1e-4, 1e-9, 0])
    assert shown == ["100 %", "99.6 %", "72 %", "5.2 %", "0.10 %", "< 0.1 %", "< 0.1 %", "< 0.1 %"]
