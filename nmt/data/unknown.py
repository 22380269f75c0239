"""Unknown words, copied from the source.

T target positions, S source positions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nmt.metrics.alignment import END, UNKNOWN, WORD_START


def copy_unknown(pieces: Sequence[str], weights: NDArray[np.float32], source: Sequence[str]) -> str:
    """Text in which each "<unk>" is the source piece it attends to most (Luong et al. 2015, 4).

    pieces (T,), weights (T, S), source (S,) as it is written, "▁" before a word's first piece. "</s>" is not copied,
    and a word that attends to nothing else stays "<unk>".
    """
    real = np.where([piece == END for piece in source], 0.0, weights)
    words = [source[i] if row.any() else UNKNOWN for i, row in zip(real.argmax(1), real, strict=True)]
    known = [word if piece == UNKNOWN else piece for piece, word in zip(pieces, words, strict=True)]
    return "".join(piece for piece in known if piece != END).replace(WORD_START, " ").strip()
