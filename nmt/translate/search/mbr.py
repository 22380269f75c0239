"""How similar the translations of one sentence are to each other: chrF or sentence BLEU of every pair, as sacreBLEU
computes them.

Shapes: N texts, V distinct n-grams of one order.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

Utility = Literal["chrf", "bleu"]
Matrix = NDArray[np.float64]
CHARACTER_ORDERS, WORD_ORDERS = range(1, 7), range(1, 5)
BETA = 2  # weight of recall in chrF


def mean_utilities(texts: Sequence[str], utility: Utility) -> list[float]:
    """The mean similarity of each text, as a hypothesis, to every other one as a reference, from 0 to 100. A text that
    is alone has 100."""
    if len(texts) == 1:
        return [100.0]
    texts = [normalize("NFC", text) for text in texts]
    counts = Counter(texts)
    of_pairs = pairwise_similarities(list(counts), utility)
    times = np.array(list(counts.values()))
    # Rounded, so that the order of a sum does not choose between equal ones.
    means = ((of_pairs @ times - of_pairs.diagonal()) / (len(texts) - 1)).round(6)
    by_text = dict(zip(counts, means.tolist(), strict=True))
    return [by_text[text] for text in texts]


def pairwise_similarities(texts: Sequence[str], utility: Utility) -> Matrix:
    """(N, N), from 0 to 100: sacreBLEU's sentence score of each text (row) with each (column) as its reference.

    chrf: character 6-grams without spaces (Popović 2015). bleu: tokenizer 13a, exponential smoothing, effective order.
    """
    if utility == "chrf":
        return _chrf(["".join(text.split()) for text in texts])
    tokenise: Callable[[str], str] = BLEU(tokenize="13a").tokenizer
    return _bleu([tokenise(text.rstrip()).split() for text in texts])


def _chrf(texts: Sequence[str]) -> Matrix:
    """F score of the mean precision and recall over all orders that both texts have."""
    n = len(texts)
    precision, recall, orders = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for order in CHARACTER_ORDERS:
        matches, totals = _matches(texts, order)
        both = (totals[:, None] > 0) & (totals > 0)
        orders += both
        precision += matches / np.maximum(totals[:, None], 1)
        recall += matches / np.maximum(totals, 1)
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    below = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(below > 0, below, 1)


def _bleu(texts: Sequence[Sequence[str]]) -> Matrix:
    """Geometric mean of the precisions up to the hypothesis's length, times the brevity penalty."""
    n, lengths = len(texts), np.array([len(text) for text in texts])
    logarithms, orders, smoothing, matched = np.zeros((n, n)), np.zeros((n, 1)), np.ones((n, n)), np.zeros((n, n))
    for order in WORD_ORDERS:
        matches, totals = _matches(texts, order)
        possible = totals[:, None] > 0
        smoothing = np.where(possible & (matches == 0), smoothing / 2, smoothing)
        counted = np.where(matches > 0, matches, smoothing) / np.maximum(totals[:, None], 1)
        logarithms += np.where(possible, np.log(counted), 0.0)
        orders, matched = orders + possible, matched + matches
    brevity = np.minimum(0.0, 1 - lengths / np.maximum(lengths[:, None], 1))
    return np.where(matched > 0, 100 * np.exp(brevity + logarithms / np.maximum(orders, 1)), 0.0)


def _matches(texts: Sequence[Sequence[Hashable]], order: int) -> tuple[Matrix, NDArray[np.int64]]:
    """The n-grams that each text shares with each other one, (N, N), and those that it has, (N,)."""
    grams = [Counter(zip(*(text[start:] for start in range(order)), strict=False)) for text in texts]
    columns = {gram: column for column, gram in enumerate(dict.fromkeys(gram for each in grams for gram in each))}
    counts = np.zeros((len(texts), len(columns)), np.int32)
    for row, each in zip(counts, grams, strict=True):
        row[[columns[gram] for gram in each]] = list(each.values())
    matches = np.array([np.minimum(counts, row).sum(1) for row in counts], np.float64)
    return matches, counts.sum(1, dtype=np.int64)
