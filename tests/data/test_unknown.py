"""Unknown words, copied from the source."""

import numpy as np

from nmt.data.tokenizer import copy_unknown

SOURCE = ["▁the", "▁zebra", "▁sleeps", "</s>"]


def weights(*rows: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    return np.eye(len(SOURCE), dtype=np.float32)[list(rows)]


def test_an_unknown_word_is_the_one_it_attends_to() -> None:
    assert copy_unknown(["▁le", "<unk>", "▁dort", "</s>"], weights(0, 1, 2, 3), SOURCE) == "le zebra dort"


def test_the_end_is_never_copied() -> None:
    row = np.array([[0.1, 0.2, 0.1, 0.6]], dtype=np.float32)
    assert copy_unknown(["<unk>"], row, SOURCE) == "zebra"


def test_what_attends_to_nothing_stays_unknown() -> None:
    assert copy_unknown(["▁le", "<unk>"], np.zeros((2, 4), dtype=np.float32), SOURCE) == "le<unk>"
    assert copy_unknown(["<unk>"], weights(3), SOURCE) == "<unk>"


def test_a_piece_inside_a_word_is_copied_without_a_space() -> None:
    assert copy_unknown(["▁caf", "<unk>", "</s>"], np.eye(3, dtype=np.float32), ["▁caf", "é", "</s>"]) == "café"
