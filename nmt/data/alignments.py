"""Word alignments of the corpus, as the attention over pieces that they ask for.

Shapes: B batch, S source positions, T target positions.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nmt.metrics.alignment import parse_pharaoh, words_of_pieces


def attention_of(alignments: Sequence[str], source: Sequence[Sequence[str]], target: Sequence[Sequence[str]]) -> Tensor:
    """Pharaoh lines and pieces, </s> last -> float32 (B, T, S).

    A row is spread evenly over the pieces of all source words linked to its word, surely or possibly, and zero where
    there are none; </s> is linked to </s>.
    """
    shape = len(source), max(map(len, target)), max(map(len, source))
    wanted = np.zeros(shape, dtype=np.float32)
    for row, line, source_pieces, target_pieces in zip(wanted, alignments, source, target, strict=True):
        source_words, target_words = words_of_pieces(source_pieces), words_of_pieces(target_pieces)
        links = np.zeros((target_words[-1] + 1, source_words[-1] + 1), dtype=np.float32)
        _, possible = parse_pharaoh(line)
        for i, j in possible:
            if j < target_words[-1] and i < source_words[-1]:  # the tokenizer may have joined words
                links[j, i] = 1.0
        links[-1, -1] = 1.0
        row[: len(target_pieces), : len(source_pieces)] = links[np.ix_(target_words, source_words)]
    return torch.from_numpy(wanted / np.maximum(wanted.sum(-1, keepdims=True), 1.0))
