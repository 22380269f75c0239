"""The words that pieces form, and their alignments: Pharaoh notation, alignment error rate, links from weights.

A link is (source word, target word), both counted from 0. Shapes: T target positions, S source positions.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Link = tuple[int, int]
Weights = NDArray[np.floating[Any]]

WORD_START = "▁"  # U+2581, SentencePiece's mark of a space
END = "</s>"
UNKNOWN = "<unk>"

_PHARAOH_TOKEN = re.compile(r"([0-9]+)([-p])([0-9]+)")


class AlignmentScores(NamedTuple):
    """Scores of word alignments, as fractions from 0 to 1. A lower `aer` is better."""

    aer: float
    precision: float
    recall: float


def parse_pharaoh(line: str) -> tuple[set[Link], set[Link]]:
    """Parse a line such as "0-0 1-2 3p4" into sure and possible links: "p" marks a link that is only possible. Sure
    links are possible too. Raises ValueError that names the first malformed token."""
    sure: set[Link] = set()
    possible: set[Link] = set()
    for token in line.split():
        match = _PHARAOH_TOKEN.fullmatch(token)
        if match is None:
            raise ValueError(f"alignment token {token!r}: expected 3-4 (sure) or 3p4 (possible)")
        link = (int(match[1]), int(match[3]))
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return sure, possible


def format_pharaoh(links: Iterable[Link]) -> str:
    """Write links in Pharaoh notation, sorted by source word, then target word."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def alignment_error_rate(
    hypotheses: Iterable[set[Link]], golds: Iterable[tuple[set[Link], set[Link]]]
) -> AlignmentScores:
    """Score hypothesis links A of a corpus against its sure and possible gold links S and P (Och and Ney 2003).

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|), precision = |A & P| / |A|, recall = |A & S| / |S|. S is a subset of P.
    Precision is 1 if A is empty, recall is 1 if S is empty, and AER is 0 if both are. Raises ValueError if the counts
    of hypotheses and golds differ.
    """
    a = s = a_and_s = a_and_p = 0
    for links, (sure, possible) in zip(hypotheses, golds, strict=True):
        assert sure <= possible
        a += len(links)
        s += len(sure)
        a_and_s += len(links & sure)
        a_and_p += len(links & possible)
    return AlignmentScores(
        aer=1 - (a_and_s + a_and_p) / (a + s) if a + s else 0.0,
        precision=a_and_p / a if a else 1.0,
        recall=a_and_s / s if s else 1.0,
    )


def words_of_line(line: str) -> list[str]:
    """Split a line at spaces into the words that alignments count. A no-break space does not separate words."""
    return [word for word in line.split(" ") if word]


def words_of_pieces(pieces: Sequence[str]) -> list[int]:
    """Return the index of the word that each SentencePiece piece belongs to.

    A word starts at the first piece, at each piece that begins with "▁", at "</s>" and after it. "<unk>" is always
    a whole word, because SentencePiece decodes it with spaces around it. A lone "▁" belongs to the piece that follows.
    A piece with "▁" inside stands for several unknown words and belongs to the first.
    """
    words = [0] * bool(pieces)
    for previous, piece in pairwise(pieces):
        alone = {END, UNKNOWN} & {previous, piece}
        starts = previous != WORD_START and bool(piece.startswith(WORD_START) or alone)
        words.append(words[-1] + previous.count(WORD_START, 1) + starts)
    return words


def merge_to_words(weights: Weights, target_pieces: Sequence[str], source_pieces: Sequence[str]) -> Weights:
    """Merge weights between pieces to weights between words: (T, S) -> (target words, source words).

    Sums over the pieces of a source word and averages over the pieces of a target word (Clark et al. 2019), so that
    rows that sum to 1 still do.
    """
    assert weights.shape == (len(target_pieces), len(source_pieces))
    target, source = _membership(target_pieces), _membership(source_pieces)
    merged: Weights = (target / np.maximum(target.sum(0), 1)).T @ weights @ source
    return merged


def words(pieces: Sequence[str]) -> list[str]:
    """Return the texts of the words that pieces form: the rows or columns of `merge_to_words`."""
    texts = [""] * (words_of_pieces(pieces)[-1] + 1 if pieces else 0)
    for word, piece in zip(words_of_pieces(pieces), pieces, strict=True):
        texts[word] += piece.replace(WORD_START, " ")
    return [text.strip() for text in texts]


def _membership(pieces: Sequence[str]) -> NDArray[np.float64]:
    """Mark the word that each piece belongs to -> (pieces, words), with 1 for the word and 0 elsewhere."""
    words = words_of_pieces(pieces)
    return np.eye(words[-1] + 1 if words else 0)[words]


def hard_alignment(word_weights: Weights) -> set[Link]:
    """Link each target word to the source word with the largest weight, the first if several are equal.

    word_weights: (target words, source words).

    A target word without any weight gets no link, as when monotonic attention has read past the end.
    """
    argmax = word_weights.argmax(1)
    return {(int(argmax[target]), int(target)) for target in np.flatnonzero(word_weights.any(1))}


def attention_to_links(weights: Weights, target_pieces: Sequence[str], source_pieces: Sequence[str]) -> set[Link]:
    """Convert attention weights (T, S) between pieces, where both sides end with "</s>", to links between words. A
    target word that attends most to the source's "</s>" stays unaligned, and so does the target's "</s>"."""
    links = hard_alignment(merge_to_words(weights, target_pieces, source_pieces))
    source_ends, target_ends = _end_words(source_pieces), _end_words(target_pieces)
    return {link for link in links if link[0] not in source_ends and link[1] not in target_ends}


def _end_words(pieces: Sequence[str]) -> set[int]:
    return {word for word, piece in zip(words_of_pieces(pieces), pieces, strict=True) if piece == END}
