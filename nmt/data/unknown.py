"""Unknown words, copied from the source.

T target positions, S source positions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nmt.metrics.alignment import END, UNKNOWN, WORD_START


def copy_unknown(pieces: Sequence[str], weights: NDArray[np.float32], source: Sequence[str]) -> str:
    """Text in which each "<unk>" is the source piece it attends to most (Luong et al. 2015, 4).

    pieces (T,), weights (T, S), source (S,) as it is written, "▁" before a word's first piece. "</s>" is not copied.
    """
    ends = np.array([piece == END for piece in source])
    words = [source[i] for i in np.where(ends, -1.0, weights).argmax(1)]
    known = [word if piece == UNKNOWN else piece for piece, word in zip(pieces, words, strict=True)]
    return "".join(piece for piece in known if piece != END).replace(WORD_START, " ").strip()
