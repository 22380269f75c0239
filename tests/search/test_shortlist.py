"""Shortlists from counts of translations."""

import numpy as np
import pytest

from nmt.translate.search.log_probs import BLOCK
from nmt.translate.search.shortlist import Shortlist

SOURCE, TARGET = 6, 1000
SPECIAL = [0, 1, 2, 3]
COUNTS = {(4, 10): 5.0, (4, 11): 3.0, (4, 12): 2.0, (4, 900): 0.1, (5, 13): 1.0, (5, 10): 4.0, (5, 999): 2.0}


def shortlist(per_token: int = 2, frequent: int = 1) -> Shortlist:
    pairs = np.array([s * TARGET + t for s, t in COUNTS])
    return Shortlist.from_counts(pairs, np.array(list(COUNTS.values())), (SOURCE, TARGET), SPECIAL, per_token, frequent)


def test_has_special_and_frequent_tokens_and_the_likeliest_translations() -> None:
    made = shortlist()
    assert made.of([]).tolist() == [0, 1, 2, 3, 10]  # 10 is the most frequent one
    assert made.of([4]).tolist() == [0, 1, 2, 3, 10, 11, 12]  # 10 is not among the two
    assert made.of([4, 5, 4]).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 999]
    assert shortlist(per_token=1).of([5]).tolist() == [0, 1, 2, 3, 10, 999]
    assert shortlist(per_token=5).of([4]).tolist() == [0, 1, 2, 3, 10, 11, 12]  # 900 is too rare


def test_of_a_model_that_copies_it_has_the_source_tokens() -> None:
    made = shortlist().with_sources()
    assert made.of([5, 4]).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 999]
    assert made.missing([[4], [5]], [[4, 5], [5]]) == pytest.approx(1 / 3)
    assert made.arrays().keys() == shortlist().arrays().keys()


def test_a_vocabulary_is_that_of_all_sentences_in_whole_blocks() -> None:
    ids = shortlist().vocabulary([[4], [5]])
    assert ids is not None
    assert len(ids) == BLOCK
    assert (np.diff(ids) > 0).all()
    assert set(shortlist().of([4, 5])) <= set(ids.tolist())


def test_nearly_all_tokens_are_all() -> None:
    everything = Shortlist(np.arange(900), np.array([0, 900]), np.arange(4), 1000)
    assert everything.vocabulary([[1]]) is None
    assert everything.vocabulary([[0]]) is not None


def test_missing_is_the_share_of_tokens_outside_their_own_sentence() -> None:
    assert shortlist().missing([[4], [5]], [[11, 12, 13, 3], [13, 3]]) == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("candidates", "ends", "size", "message"),
    [
        ([1, 2], [1, 3], 10, "does not match"),
        ([1, 2], [2, 1], 10, "does not match"),
        ([1, 2], [], 10, "does not match"),
        ([1, 12], [1, 2], 10, "outside a vocabulary of 10"),
        ([1, -1], [1, 2], 10, "outside"),
    ],
)
def test_what_does_not_fit_is_refused(candidates: list[int], ends: list[int], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shortlist(np.array(candidates), np.array(ends, np.int64), np.arange(4), size)
