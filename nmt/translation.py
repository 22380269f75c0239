"""What comes of translating a line.

Shapes: S source positions, T target positions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmt.metrics.alignment import attention_to_links, format_pharaoh, merge_to_words, words


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float  # what translations are ranked by: the log-probability over its length penalty
    log_prob: float  # natural logarithm
    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    alignment: NDArray[np.float32] | None  # (T, S) attention, a row for each of `tokens`; None without attention

    def word_alignment(self) -> str:
        """Source-target pairs of words, which spaces separate, from each target word's strongest link (Pharaoh)."""
        if self.alignment is None:
            return ""
        return format_pharaoh(attention_to_links(self.alignment, self.tokens, self.source_tokens))

    def word_weights(self) -> dict[str, Any] | None:
        """Source words, target words ("</s>" last) and the attention between them: whole percents, a row for each
        target word. None without attention."""
        if self.alignment is None:
            return None
        weights = merge_to_words(self.alignment, self.tokens, self.source_tokens)
        percents = np.rint(100 * weights).astype(int).tolist()
        return {"source": words(self.source_tokens), "target": words(self.tokens), "weights": percents}
