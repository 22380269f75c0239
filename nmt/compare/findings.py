"""Findings of papers that configs/experiment/papers/ trains: the published figures and the statements to check.

The figures are the papers'. A limit other than 0 is ours, where a paper says "close" or "no loss", and its statement
gives it. To add a finding, write it here, add it to FINDINGS, and add an experiment of the same name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nmt.compare.page import centre
from nmt.compare.verdict import Scores, Statement, difference
from nmt.config.errors import UserError, nearest

PERCENT = 100
WORDS = 10  # the slope of BLEU over length is given per so many words
LEAST_FALL = -5.0  # percent of BLEU per WORDS: what counts as no fall
CLOSE = -10.0  # percent of BLEU: what counts as close


@dataclass(frozen=True)
class Model:
    """A model of a paper, and the choices that train it here."""

    label: str
    choices: Mapping[str, str]  # by key, as in the command line
    published: float | None = None  # BLEU


@dataclass(frozen=True)
class Finding:
    """What a paper reports."""

    title: str
    source: str
    setting: str  # data and score of the published figures
    models: tuple[Model, ...]
    statements: tuple[Statement, ...]
    caveat: str  # how the experiment differs from the paper's
    by_length: bool = False  # whether the chart shows BLEU by source length


def find_finding(name: str) -> Finding:
    """The finding with this name. Raises UserError with the nearest one."""
    if name not in FINDINGS:
        raise UserError(f"finding={name}: not one of {', '.join(FINDINGS)}{nearest(name, FINDINGS)}")
    return FINDINGS[name]


def better(one: str, other: str, text: str, published: str) -> Statement:
    """The first model has a higher BLEU than the second."""
    return Statement(text, published, (one, other), difference)


def lead(first: Scores, *others: Scores) -> float:
    """BLEU of the first minus that of the best of the others."""
    return first.bleu - max(other.bleu for other in others)


def relative_difference(one: Scores, other: Scores) -> float | None:
    """The difference in BLEU in percent of the second."""
    return PERCENT * (one.bleu - other.bleu) / other.bleu if other.bleu else None


def slope(scores: Scores) -> float | None:
    """The change of BLEU per ten more source words, in percent of the mean: a line fitted to the parts of the test set
    by length, weighted by their sentences. None with fewer than two parts."""
    lengths = np.array([centre(part) for part in scores.by_length])
    bleu = np.array([part["bleu"] for part in scores.by_length])
    sentences = np.array([part["sentences"] for part in scores.by_length])
    if len(bleu) < 2 or not bleu.any():  # noqa: PLR2004 - a line needs two points
        return None
    fitted = np.polyfit(lengths, bleu, 1, w=np.sqrt(sentences))
    return float(PERCENT * WORDS * fitted[0] / np.average(bleu, weights=sentences))


def fall(scores: Scores) -> float | None:
    """The slope downwards."""
    change = slope(scores)
    return None if change is None else -change


def slope_difference(one: Scores, other: Scores) -> float | None:
    """The slope of the first minus that of the second."""
    first, second = slope(one), slope(other)
    return None if first is None or second is None else first - second


PER_WORDS = f"% of BLEU per {WORDS} words"

BAHDANAU_2015 = Finding(
    title="Attention keeps its quality on long sentences, a fixed vector does not",
    source="Bahdanau, Cho and Bengio 2015, Neural Machine Translation by Jointly Learning to Align and Translate, "
    "Figure 2, Table 1 and section 5.1",
    setting="WMT'14 English-French, newstest2014, all sentences; trained on sentences of up to 50 words (Table 1). "
    "Figure 2 shows BLEU against sentence length without printing numbers, so that only its direction is checked.",
    models=(
        Model("fixed vector", {"attention": "none"}, 17.82),
        Model("attention", {"attention": "bahdanau"}, 26.75),
    ),
    statements=(
        Statement(
            "Without attention, BLEU falls with the length of the source (slope downwards above 0)",
            "falls sharply (Figure 2)",
            ("fixed vector",),
            fall,
            PER_WORDS,
        ),
        Statement(
            "With attention, BLEU loses less with length than without (difference of the slopes above 0)",
            "more robust to length (Figure 2)",
            ("attention", "fixed vector"),
            slope_difference,
            PER_WORDS,
        ),
        Statement(
            f"With attention, BLEU does not fall with length (slope above {LEAST_FALL:g} %, a limit of ours)",
            "no loss up to 50 words and more (Figure 2)",
            ("attention",),
            slope,
            PER_WORDS,
            LEAST_FALL,
        ),
        better("attention", "fixed vector", "With attention, BLEU is higher overall", "26.75 against 17.82 (Table 1)"),
    ),
    caveat="The paper's model without attention feeds the fixed vector to every step; attention.context=every_step of "
    "the preset none does so, its default gives the vector to the first state only.",
    by_length=True,
)

LUONG_2015 = Finding(
    title="Dot suits global attention, predicted windows suit local attention and are best",
    source="Luong, Pham and Manning 2015, Effective Approaches to Attention-based Neural Machine Translation, Table 4",
    setting="WMT'14 English-German, newstest2014, BLEU before unknown words are replaced.",
    models=(
        Model("location", {"attention": "luong_location"}, 18.1),
        Model("dot", {"attention": "luong_dot"}, 18.6),
        Model("general", {"attention": "luong_general"}, 17.3),
        Model("local-m", {"attention": "luong_local_m"}, 18.6),
        Model("local-p", {"attention": "luong_local_p"}, 19.0),
    ),
    statements=(
        better("dot", "location", "A score that reads the source words (dot) beats location", "18.6 against 18.1"),
        better("dot", "general", "For global attention, dot beats general", "18.6 against 17.3"),
        better("local-p", "local-m", "Predicted positions (local-p) beat monotonic (local-m)", "19.0 against 18.6"),
        Statement(
            "local-p with the general score is the best of all (difference from the best other)",
            "19.0 against 18.6",
            ("local-p", "location", "dot", "general", "local-m"),
            lead,
        ),
    ),
    caveat="Both local models have the general score. Subwords leave no unknown words, so that the gain from replacing "
    "them cannot be seen. The paper's encoder and decoder are LSTMs of four layers, and its encoder reads in one "
    "direction (encoder.bidirectional=false).",
)

DENG_2018 = Finding(
    title="Attention as a latent variable: exact and variational training beat soft attention, hard attention does not",
    source="Deng, Kim, Chiu, Guo and Rush 2018, Latent Alignment and Variational Attention, Table 1; hard attention is "
    "that of Xu et al. 2015",
    setting="IWSLT 2014 German-English, BLEU. Variational attention sums over all positions, hard attention is "
    "trained with one sample; the other way round they reach 33.30 and 31.40.",
    models=(
        Model("soft", {"attention": "luong_general"}, 32.77),
        Model("marginal", {"attention": "marginal"}, 33.29),
        Model("variational", {"attention": "variational"}, 33.68),
        Model("hard", {"attention": "hard"}, 31.00),
    ),
    statements=(
        better("marginal", "soft", "The exact marginal likelihood beats soft attention", "33.29 against 32.77"),
        better("variational", "soft", "Variational attention beats soft attention", "33.68 against 32.77"),
        better("soft", "hard", "Hard attention is worse than soft attention", "31.00 against 32.77"),
    ),
    caveat="All four have the same decoder and the general score, and differ in what is done with the weights. "
    "The sums run over the 8 most probable positions, and hard attention uses the distribution at half of its steps. "
    "The differences in the paper are small: few seeds leave them undecided.",
)

RAFFEL_2017 = Finding(
    title="Monotonic attention, hard and online when it translates, stays close to soft attention",
    source="Raffel, Luong, Liu, Weiss and Eck 2017, Online and Linear-Time Attention by Enforcing Monotonic Alignments",
    setting="Where input and output have nearly the same order. Only the direction is checked: the paper calls its "
    "results competitive, and Chiu and Raffel 2018 (Monotonic Chunkwise Attention, introduction) say that they lag "
    "behind those of soft attention.",
    models=(
        Model("soft", {"attention": "monotonic", "attention/normalizer": "softmax"}),
        Model("monotonic", {"attention": "monotonic", "attention/normalizer": "monotonic"}),
    ),
    statements=(
        Statement(
            f"Monotonic attention is close to soft attention (difference above {CLOSE:g} %, a limit of ours)",
            "competitive (Raffel et al. 2017, abstract)",
            ("monotonic", "soft"),
            relative_difference,
            "% of BLEU",
            CLOSE,
        ),
        better("soft", "monotonic", "Soft attention is ahead", "monotonic lags behind (Chiu and Raffel 2018)"),
    ),
    caveat="Both models have the same score and decoder, and differ only in the normalizer. In the demo corpus, "
    "adjectives change sides with their nouns, which monotonic attention cannot follow: expect more loss there than "
    "between languages with nearly the same order.",
)

FINDINGS = {
    "bahdanau_2015_figure_2": BAHDANAU_2015,
    "luong_2015_table_4": LUONG_2015,
    "deng_2018_table_1": DENG_2018,
    "raffel_2017_monotonic": RAFFEL_2017,
}
