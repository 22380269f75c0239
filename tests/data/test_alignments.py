"""Word alignments as attention over pieces."""

import torch

from nmt.data.batching import gold_attention

SOURCE = [["▁the", "▁ca", "t", "</s>"], ["▁no", "</s>"]]
TARGET = [["▁le", "▁ch", "at", "</s>"], ["▁non", "</s>"]]


def test_links_of_words_spread_over_their_pieces() -> None:
    first, _ = gold_attention(["0-0 1-1", "0p0"], SOURCE, TARGET)
    cat = [0.0, 0.5, 0.5, 0.0]
    torch.testing.assert_close(first, torch.tensor([[1.0, 0.0, 0.0, 0.0], cat, cat, [0.0, 0.0, 0.0, 1.0]]))


def test_rows_are_zero_on_padding_and_where_nothing_is_linked() -> None:
    _, second = gold_attention(["", ""], SOURCE, TARGET)
    assert second[0].sum() == 0
    torch.testing.assert_close(second[1], torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert second[2:].sum() == 0


def test_several_words_share_a_row() -> None:
    (only,) = gold_attention(["0-0 1-0"], [["▁a", "▁b", "</s>"]], [["▁x", "</s>"]])
    torch.testing.assert_close(only[0], torch.tensor([0.5, 0.5, 0.0]))


def test_links_beyond_what_the_tokenizer_left_are_passed_over() -> None:
    (only,) = gold_attention(["0-0 7-0 0-9 1-0 0-1"], [["▁a", "</s>"]], [["▁x", "</s>"]])
    torch.testing.assert_close(only[0], torch.tensor([1.0, 0.0]))
