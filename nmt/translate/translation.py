"""One translation: its text, scores, pieces and attention. Shapes: S source positions, T target positions."""

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nmt.config.errors import UserError
from nmt.data.word_alignment import attention_to_links, format_pharaoh, merge_to_words, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    # With search=beam, log_prob divided by the length penalty, plus the term of search.coverage_penalty. With
    # search=mbr, the mean similarity to the other candidates. With other searches, log_prob.
    score: float
    log_prob: float  # natural logarithm of the probability of all `tokens`
    source_tokens: list[str]  # pieces of the source, </s> last
    tokens: list[str]  # pieces of the translation, </s> last
    alignment: NDArray[np.float32] | None  # (T, S) attention weights, a row for each token; None without attention
    token_log_probs: list[float]  # log-probabilities of the tokens; their sum is log_prob
    text_pieces: list[str]  # pieces of `text`: `tokens`, with the copied source piece in place of each "<unk>"

    def word_alignment(self) -> str:
        """Link each target word to the source word that it attends to most, unless that is "</s>": Pharaoh links,
        separated by spaces; empty without attention."""
        if self.alignment is None:
            return ""
        return format_pharaoh(attention_to_links(self.alignment, self.text_pieces, self.source_tokens))

    def word_weights(self) -> dict[str, Any] | None:
        """Return the source words, the target words ("</s>" last in both), and the attention weights in whole percent,
        with a row for each target word; None without attention."""
        if self.alignment is None:
            return None
        weights = merge_to_words(self.alignment, self.text_pieces, self.source_tokens)
        percents = np.rint(100 * weights).astype(int).tolist()
        return {"source": words(self.source_tokens), "target": words(self.text_pieces), "weights": percents}

    def plot(self, title: str | None = None) -> "Figure":
        """Draw the attention weights as a heatmap, titled with the translation by default. Raises UserError without
        attention."""
        if self.alignment is None:
            raise UserError("the model has no attention to draw")
        from nmt.translate.heatmap import draw_alignment  # matplotlib takes half a second to import

        return draw_alignment(self.alignment, self.source_tokens, self.tokens, self.text if title is None else title)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the translation, and a table of the attention between words. Each cell's tooltip
        names the two words and their weight."""
        heading, weights = f"<p><b>{html.escape(self.text)}</b></p>", self.word_weights()
        if weights is None:
            return heading
        source, target = ([html.escape(word) for word in weights[side]] for side in ("source", "target"))
        table = "<tr>" + "".join(f"<th>{column}</th>" for column in ["", *source]) + "</tr>"
        for row, percents in zip(target, weights["weights"], strict=True):
            cells = ""
            for column, percent in zip(source, percents, strict=True):
                style = f"background: rgba(38, 84, 168, {percent / 100}); min-width: 1.5em"
                cells += f'<td title="{row} ← {column}: {percent} %" style="{style}">&nbsp;</td>'
            table += f"<tr><th>{row}</th>{cells}</tr>"
        return f"{heading}<table>{table}</table>"
