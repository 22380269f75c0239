"""One translation, with its scores and its alignment.

Shapes: S source positions, T target positions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmt.data.word_alignment import attention_to_links, format_pharaoh, merge_to_words, words


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float  # log-probability over its length penalty, with a coverage penalty; of search=mbr: mean utility
    log_prob: float  # natural logarithm
    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    alignment: NDArray[np.float32] | None  # (T, S) attention, a row for each of `tokens`; None without attention
    token_log_probs: list[float]  # of each of `tokens`, which sum to log_prob
    tags: int = 0  # source tokens in front that are tags of languages

    def word_alignment(self) -> str:
        """Pharaoh links between words, separated by spaces: each target word to the source word it attends to most."""
        if self.alignment is None:
            return ""
        weights, source = self.alignment[:, self.tags :], self.source_tokens[self.tags :]
        return format_pharaoh(attention_to_links(weights, self.tokens, source))

    def word_weights(self) -> dict[str, Any] | None:
        """Source words, target words ("</s>" last) and the attention between them in whole percent, a row for each
        target word. None without attention."""
        if self.alignment is None:
            return None
        weights = merge_to_words(self.alignment, self.tokens, self.source_tokens)
        percents = np.rint(100 * weights).astype(int).tolist()
        return {"source": words(self.source_tokens), "target": words(self.tokens), "weights": percents}
