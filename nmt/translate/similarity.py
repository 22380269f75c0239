"""Similarity of texts by their n-grams: the formulas of BLEU and chrF, and the utility of minimum Bayes risk decoding.

Shapes: N texts, V distinct n-grams of one order.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Utility = Literal["chrf", "bleu"]
CHRF_BETA = 2  # recall has CHRF_BETA**2 times the weight of precision


def bleu_score(sums: Floats, effective_order: bool = False) -> Floats:
    """Compute BLEU (Papineni et al. 2002) with exponential smoothing: (..., 10) -> (...), from 0 to 100.

    sums: the lengths of output and reference, the matches of orders 1 to 4, and the numbers of n-grams in the output of
    orders 1 to 4. The k-th order without a match counts 1 / 2^k matches. If the output has no n-gram of an order, the
    score is 0, or with `effective_order` that of the other orders.
    """
    length, reference, matches, totals = sums[..., 0], sums[..., 1], sums[..., 2:6], sums[..., 6:10]
    present = totals > 0
    missed = present & (matches == 0)
    smoothed = np.where(missed, 0.5 ** np.cumsum(missed, -1), matches)
    logs = np.log(np.where(present, smoothed, 1.0) / np.where(present, totals, 1.0))
    orders = np.maximum(present.sum(-1), 1) if effective_order else 4
    penalty = np.minimum(1 - reference / np.where(length > 0, length, 1.0), 0.0)
    score = 100 * np.exp(penalty + logs.sum(-1) / orders)
    nothing = (matches.sum(-1) == 0) | (length == 0) | (not effective_order and ~present.all(-1))
    return np.where(nothing, 0.0, score)


def chrf_score(sums: Floats) -> Floats:
    """Compute chrF (Popović 2015), the F score of precision and recall, each a mean over the orders that both texts
    have: (..., 18) -> (...), from 0 to 100. sums: for each order from 1 to 6, the numbers of n-grams in the output and
    in the reference, and the matches."""
    output, reference, matches = (sums[..., part::3] for part in range(3))
    present = (output > 0) & (reference > 0)
    orders = np.maximum(present.sum(-1), 1)
    precision, recall = (
        np.where(present, matches / np.where(present, counts, 1.0), 0.0).sum(-1) / orders
        for counts in (output, reference)
    )
    weighted = CHRF_BETA**2 * precision + recall
    score: Floats = 100 * (1 + CHRF_BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1.0)
    return score


def mean_utilities(texts: Sequence[str], utility: Utility) -> list[float]:
    """Compute the mean similarity of each text to the others, which are its references, from 0 to 100. A single text
    has 100."""
    if len(texts) <= 1:
        return [100.0] * len(texts)
    texts = [normalize("NFC", text) for text in texts]
    counts = Counter(texts)
    of_pairs = pairwise_similarities(list(counts), utility)
    times = np.array(list(counts.values()))
    # Rounding keeps equal means equal, in whatever order their terms are added.
    means = ((of_pairs @ times - of_pairs.diagonal()) / (len(texts) - 1)).round(6)
    by_text = dict(zip(counts, means.tolist(), strict=True))
    return [by_text[text] for text in texts]


def pairwise_similarities(texts: Sequence[str], utility: Utility) -> Floats:
    """Compute sacreBLEU's sentence score of each text (row) with each text as reference (column): (N, N), 0 to 100.

    chrf: character 6-grams without spaces. bleu: tokenizer 13a, exponential smoothing, effective order.
    """
    if utility == "chrf":
        characters = ["".join(text.split()) for text in texts]
        counts = [_matches(characters, order) for order in range(1, 7)]
        parts = [part for matches, totals in counts for part in (totals[:, None], totals, matches)]
        return chrf_score(np.stack(np.broadcast_arrays(*parts), -1))
    from sacrebleu.metrics.bleu import BLEU  # takes long to load, and few searches need it

    tokenise: Callable[[str], str] = BLEU(tokenize="13a").tokenizer
    words = [tokenise(text.rstrip()).split() for text in texts]
    lengths, counts = np.array([len(text) for text in words]), [_matches(words, order) for order in range(1, 5)]
    parts = [lengths[:, None], lengths, *(matches for matches, _ in counts), *(totals[:, None] for _, totals in counts)]
    return bleu_score(np.stack(np.broadcast_arrays(*parts), -1), effective_order=True)


def _matches(texts: Sequence[Sequence[Hashable]], order: int) -> tuple[Floats, NDArray[np.int64]]:
    """Count the n-grams of an order that each two texts share, (N, N), and the n-grams of each text, (N,)."""
    counters = [Counter(zip(*(text[start:] for start in range(order)), strict=False)) for text in texts]
    columns = {gram: i for i, gram in enumerate(dict.fromkeys(gram for counter in counters for gram in counter))}
    counts = np.zeros((len(texts), len(columns)), np.int32)
    for row, counter in zip(counts, counters, strict=True):
        row[[columns[gram] for gram in counter]] = list(counter.values())
    matches = np.array([np.minimum(counts, row).sum(1) for row in counts], np.float64)
    return matches, counts.sum(1, dtype=np.int64)
