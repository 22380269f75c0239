"""Word alignments: Pharaoh notation, alignment error rate, links from attention weights, attention statistics.

A link is (source word, target word), both counted from 0. T target positions, S source positions.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class AlignmentScores:
    """Fractions from 0 to 1; of `aer` less is better."""

    aer: float
    precision: float
    recall: float


def parse_pharaoh(line: str) -> tuple[set[Link], set[Link]]:
    """The sure and the possible links of a line such as "0-0 1-2 3p4": "-" is sure, "p" possible only.

    Every sure link is possible too. Raises ValueError that names the first token of another form.
    """
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
    """The links in Pharaoh notation, sorted by source and then target word."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def alignment_error_rate(
    hypotheses: Iterable[set[Link]], golds: Iterable[tuple[set[Link], set[Link]]]
) -> AlignmentScores:
    """Och and Ney (2003), over the whole corpus: A hypothesis, S sure and P possible gold links, S within P.

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|), precision = |A & P| / |A|, recall = |A & S| / |S|.
    Without links in A nothing is wrong (precision 1), without any in S nothing is missed (recall 1), and
    without both the AER is 0. Raises ValueError if there are not as many golds as hypotheses.
    """
    hypotheses, golds = list(hypotheses), list(golds)
    if len(hypotheses) != len(golds):
        raise ValueError(f"{len(hypotheses)} alignments against {len(golds)} gold alignments: must be equal")
    proposed = sure_total = sure_found = possible_found = 0
    for links, (sure, possible) in zip(hypotheses, golds, strict=True):
        assert sure <= possible
        proposed += len(links)
        sure_total += len(sure)
        sure_found += len(links & sure)
        possible_found += len(links & possible)
    return AlignmentScores(
        aer=1.0 - _ratio(sure_found + possible_found, proposed + sure_total),
        precision=_ratio(possible_found, proposed),
        recall=_ratio(sure_found, sure_total),
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def words_of_line(line: str) -> list[str]:
    """The words that alignments count: separated by spaces, not by other white space such as a no-break space."""
    return [word for word in line.split(" ") if word]


def words_of_pieces(pieces: Sequence[str]) -> list[int]:
    """The index of the word that each SentencePiece piece belongs to.

    A word starts with the first piece, at each piece that begins with the mark, at "</s>" and after it. So does
    "<unk>" and what follows it, since SentencePiece writes it out between spaces. A lone mark belongs to the pieces
    that follow it. A piece with marks inside stands for several unknown words: it counts as the first of them.
    """
    words = [0] * bool(pieces)
    for previous, piece in pairwise(pieces):
        unknown = previous == UNKNOWN or (piece == UNKNOWN and previous != WORD_START)
        starts = piece.startswith(WORD_START) or END in (previous, piece) or unknown
        words.append(words[-1] + previous.count(WORD_START, 1) + starts)
    return words


def merge_to_words(weights: Weights, target_pieces: Sequence[str], source_pieces: Sequence[str]) -> Weights:
    """(T, S) of pieces -> (T, S) of words: the sum over a source word, the mean over a target word.

    This keeps the sum of a row's weights at 1 (Clark et al. 2019).
    """
    assert weights.shape == (len(target_pieces), len(source_pieces))
    target, source = _membership(target_pieces), _membership(source_pieces)
    merged: Weights = (target / np.maximum(target.sum(0), 1)).T @ weights @ source
    return merged


def words(pieces: Sequence[str]) -> list[str]:
    """The words that `merge_to_words` merges to, as text."""
    texts = [""] * (words_of_pieces(pieces)[-1] + 1 if pieces else 0)
    for word, piece in zip(words_of_pieces(pieces), pieces, strict=True):
        texts[word] += piece.replace(WORD_START, " ")
    return [text.strip() for text in texts]


def _membership(pieces: Sequence[str]) -> NDArray[np.float64]:
    """(pieces, words), 1 where the piece belongs to the word."""
    words = words_of_pieces(pieces)
    return np.eye(words[-1] + 1 if words else 0)[words]


def hard_alignment(word_weights: Weights) -> set[Link]:
    """(T, S) -> the link from each target word to its heaviest source word, the first of equals; none from a row of
    zeros (monotonic attention past the end)."""
    heaviest = word_weights.argmax(1)
    return {(int(heaviest[target]), int(target)) for target in np.flatnonzero(word_weights.any(1))}


def attention_to_links(weights: Weights, target_pieces: Sequence[str], source_pieces: Sequence[str]) -> set[Link]:
    """(T, S) of pieces, ends included -> word links.

    A target word that attends most to the source's "</s>" stays unaligned; the target's "</s>" has no link.
    """
    links = hard_alignment(merge_to_words(weights, target_pieces, source_pieces))
    source_ends, target_ends = _end_words(source_pieces), _end_words(target_pieces)
    return {link for link in links if link[0] not in source_ends and link[1] not in target_ends}


def _end_words(pieces: Sequence[str]) -> set[int]:
    return {word for word, piece in zip(words_of_pieces(pieces), pieces, strict=True) if piece == END}


class AttentionStatistics(NamedTuple):
    """Means over all rows, that is target tokens, of several sentences. A row counts by its shares, one without any
    weight (monotonic attention past the end) not at all. Of heads the mean weights are looked at."""

    entropy: float  # nats; 0: one position, log S: all alike
    on_end: float  # share of the weight on the source's last position, </s>


class Positions(NamedTuple):
    """Where an attention stood that takes one position at a time."""

    positions: NDArray[np.int64]  # from 0, of all rows that took one
    jumps: NDArray[np.int64]  # from each row's position to the next row's: negative is backwards


def attention_statistics(alignments: Sequence[Weights]) -> AttentionStatistics:
    """Of (T, S) weights of one sentence each; at least one."""
    entropies, on_end = [np.zeros(0)], [np.zeros(0)]
    for weights in alignments:
        rows = weights[weights.any(1)]
        shares = rows / rows.sum(1, keepdims=True)
        entropies.append(-(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1))
        on_end.append(shares[:, -1])
    if not sum(map(len, on_end)):
        return AttentionStatistics(0.0, 0.0)
    return AttentionStatistics(float(np.concatenate(entropies).mean()), float(np.concatenate(on_end).mean()))


def chosen_positions(alignments: Sequence[Weights]) -> Positions | None:
    """Of (T, S) weights of one sentence each; None unless all weights are 0 or 1."""
    if not all(((weights == 0) | (weights == 1)).all() for weights in alignments):
        return None
    paths = [weights.argmax(1)[weights.any(1)] for weights in alignments]
    nothing = np.zeros(0, np.int64)
    return Positions(np.concatenate([nothing, *paths]), np.concatenate([nothing, *(np.diff(path) for path in paths)]))
