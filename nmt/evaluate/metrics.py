"""Metrics of outputs: sacreBLEU's BLEU, chrF and TER (Post 2018), and error rates of short outputs such as sounds.

A metric counts statistics of each sentence, and its formula turns their sum into a score, so that subsets of the test
set and resampled sentences are scored without their text. A metric of your own is a class here and a line in METRICS.
Texts are compared in Unicode NFC: composed and decomposed characters are equal. Shapes: N sentences, k statistics of a
metric.
"""

import math
import unicodedata
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import rapidfuzz
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.config.errors import UserError, nearest
from nmt.translate.similarity import Floats, bleu_score, chrf_score

Counts = NDArray[np.int64]
Answers = Sequence[Sequence[str]]  # the right outputs of each of N sentences: its own reference first

# sacreBLEU's tokenizers for single languages, by ISO 639-1 and 639-3 codes.
_TOKENIZER_OF_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
}
# sacreBLEU's tokenizers for text without spaces. TER would take a whole sentence of such text for one word.
_SPLITS_CHARACTERS = {"zh", "ja-mecab", "char"}


@dataclass(frozen=True)
class ScoreSettings:
    """How outputs are scored."""

    tokenize: str  # sacreBLEU's option `--tokenize` for BLEU; TER splits Chinese or Japanese if this tokenizer does
    lowercase: bool  # whether case is ignored; TER always ignores it
    metrics: tuple[str, ...] = ("bleu", "chrf", "ter")  # keys of METRICS; the first one ranks


class Metric(ABC):
    """Statistics of sentences and a formula over their sums."""

    heading: ClassVar[str]  # in tables and logs
    decimals: ClassVar[int] = 2  # of a score in tables
    higher_is_better: ClassVar[bool] = True

    @abstractmethod
    def count(self, hypotheses: Sequence[str], answers: Answers, settings: ScoreSettings) -> tuple[Counts, str]:
        """Count the statistics (N, k) of N outputs in NFC, and return them with the metric's signature. Column 1 does
        not depend on the outputs.

        The signature names all that the score depends on, such as sacreBLEU's version. Raises UserError for an unknown
        setting, and for one that needs a package that is not installed.
        """

    @abstractmethod
    def formula(self, sums: Floats) -> Floats:
        """Compute scores from sums of statistics: (..., k) -> (...)."""

    def of_sentences(self, counts: Counts) -> Floats:
        """Score each sentence alone: (N, k) -> (N,)."""
        return self.formula(counts.astype(float))


class Bleu(Metric):
    """BLEU (Papineni et al. 2002), from 0 to 100."""

    heading = "BLEU"

    def count(self, hypotheses: Sequence[str], answers: Answers, settings: ScoreSettings) -> tuple[Counts, str]:
        """(N, 10): see `bleu_score`. Raises UserError if the tokenizer is unknown or not installed."""
        name = settings.tokenize
        if name not in BLEU.TOKENIZERS:
            raise UserError(f"evaluation.tokenize: {name!r} is unknown; allowed: {', '.join(BLEU.TOKENIZERS)}")
        try:
            # `force` silences the warning that the text looks tokenized. Some corpora are tokenized on purpose.
            scorer = BLEU(tokenize=name, lowercase=settings.lowercase, force=True)
        except (RuntimeError, OSError) as error:  # it lacks a package, or its model is damaged or cannot be downloaded
            reason = " ".join(str(error).split())
            raise UserError(f"evaluation.tokenize: {name!r} cannot be used: {reason}") from error
        return _sacrebleu(scorer, hypotheses, answers)

    def formula(self, sums: Floats) -> Floats:
        return bleu_score(sums)

    def of_sentences(self, counts: Counts) -> Floats:
        """(N, 10) -> (N,), with sacreBLEU's effective order: n-grams longer than the sentence do not count."""
        return bleu_score(counts.astype(float), effective_order=True)


class Chrf(Metric):
    """chrF (Popović 2015), from 0 to 100."""

    heading = "chrF"

    def count(self, hypotheses: Sequence[str], answers: Answers, settings: ScoreSettings) -> tuple[Counts, str]:
        """(N, 18): see `chrf_score`."""
        return _sacrebleu(CHRF(lowercase=settings.lowercase), hypotheses, answers)

    def formula(self, sums: Floats) -> Floats:
        return chrf_score(sums)


class ErrorRate(Metric):
    """Errors divided by a length, in percent: (..., 2) -> (...). Errors where nothing is right count as 100 %."""

    higher_is_better = False

    def formula(self, sums: Floats) -> Floats:
        errors, length = sums[..., 0], sums[..., 1]
        return 100 * np.where(length > 0, errors / np.where(length > 0, length, 1.0), errors > 0)


class Ter(ErrorRate):
    """Translation edit rate (Snover et al. 2006), in percent."""

    heading = "TER"

    def count(self, hypotheses: Sequence[str], answers: Answers, settings: ScoreSettings) -> tuple[Counts, str]:
        """(N, 2): edits, and words of the reference."""
        splits = settings.tokenize in _SPLITS_CHARACTERS  # sacreBLEU splits characters only if it also normalises
        return _sacrebleu(TER(normalized=splits, asian_support=splits), hypotheses, answers)


class WrongOutputs(ErrorRate):
    """How many outputs are not exactly right, in percent. Where each line is one word, such as a pronunciation
    of its sounds, this is the word error rate of grapheme-to-phoneme conversion (Gorman et al. 2020)."""

    heading = "WER"

    def count(self, hypotheses: Sequence[str], answers: Answers, settings: ScoreSettings) -> tuple[Counts, str]:
        """(N, 2): 1 unless the output equals one of the answers but for spaces, and 1."""
        wrong = [
            _symbols(output, settings) not in [_symbols(answer, settings) for answer in right]
            for output, right in zip(hypotheses, answers, strict=True)
        ]
        return np.array([wrong, np.ones(len(wrong))], np.int64).T, f"case:{_case(settings)}|refs:any"


class SymbolErrors(ErrorRate):
    """Symbol error rate, in percent: the edits that turn outputs into references, over the symbols of the references.
    Spaces separate symbols. Where symbols are phones, it is the phone error rate (Gorman et al. 2020)."""

    heading = "SER"

    def count(self, hypotheses: Sequence[str], answers: Answers, settings: ScoreSettings) -> tuple[Counts, str]:
        """(N, 2): edits (Levenshtein 1966) to the nearest answer, and symbols of the sentence's own reference."""
        counts = []
        for output, right in zip(hypotheses, answers, strict=True):
            symbols, targets = _symbols(output, settings), [_symbols(answer, settings) for answer in right]
            counts.append([min(Levenshtein.distance(symbols, target) for target in targets), len(targets[0])])
        version = f"version:rapidfuzz {rapidfuzz.__version__}"
        return np.array(counts, np.int64), f"case:{_case(settings)}|refs:any|symbols:spaced|{version}"


def _symbols(line: str, settings: ScoreSettings) -> list[str]:
    return (line.lower() if settings.lowercase else line).split()


def _case(settings: ScoreSettings) -> str:
    return "lc" if settings.lowercase else "mixed"


METRICS: dict[str, Metric] = {
    "bleu": Bleu(),
    "chrf": Chrf(),
    "ter": Ter(),
    "wer": WrongOutputs(),
    "ser": SymbolErrors(),
}
WITHOUT_TEXT = ("loss", "aer")  # validation scores beside METRICS that can be monitored; lower is better


def sign_of(name: str) -> int:
    """Return 1 if higher values of a validation score (a metric, or loss or aer) are better, else -1."""
    return 1 if name in METRICS and METRICS[name].higher_is_better else -1


def shown(scores: Mapping[str, float]) -> str:
    """Format the metrics among these values for the log: "BLEU 35.20  TER 48.31"."""
    known = [(metric, scores[name]) for name, metric in METRICS.items() if name in scores]
    return "  ".join(f"{metric.heading} {score:.{metric.decimals}f}" for metric, score in known)


def check_known(key: str, name: str, others: Sequence[str] = ()) -> None:
    """Raise UserError, which names the configuration's `key`, unless `name` is a metric or one of `others`."""
    allowed = [*METRICS, *others]
    if name not in allowed:
        raise UserError(f"{key}={name}: not one of {', '.join(allowed)}{nearest(name, allowed)}")


@dataclass(frozen=True)
class Counted:
    """The statistics of N sentences, by metric."""

    counts: Mapping[str, Counts]  # (N, k)
    signatures: Mapping[str, str]

    def scores(self) -> dict[str, float]:
        """Score all sentences together by each metric."""
        return {name: corpus_score(counts, name) for name, counts in self.counts.items()}


def corpus_score(counts: NDArray[np.int64] | Floats, metric: str) -> float:
    """Score all sentences together from their statistics (N, k)."""
    return float(METRICS[metric].formula(counts.sum(0, dtype=float)))


def count(
    hypotheses: Sequence[str],
    references: Sequence[str],
    settings: ScoreSettings,
    metrics: Collection[str] | None = None,
    sources: Sequence[str] | None = None,
) -> Counted:
    """Count the statistics of detokenised hypotheses with one reference each, for `metrics`, or else for all metrics of
    the settings.

    Given the sources, WER and SER accept any reference of the same source, as for a homograph. Raises ValueError if the
    numbers of hypotheses and references differ or are zero, and UserError for an invalid setting.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"cannot score {len(hypotheses)} hypotheses against {len(references)} references")
    hypotheses, answers = nfc(hypotheses), _answers(nfc(references), sources)
    counted = {
        name: METRICS[name].count(hypotheses, answers, settings)
        for name in (settings.metrics if metrics is None else metrics)
    }
    return Counted(
        {name: counts for name, (counts, _) in counted.items()},
        {name: signature for name, (_, signature) in counted.items()},
    )


def _answers(references: Sequence[str], sources: Sequence[str] | None) -> Answers:
    """List for each sentence its own reference, then all references of its source, if the sources are given."""
    if sources is None:
        return [[reference] for reference in references]
    of_source = defaultdict[str, dict[str, None]](dict)  # a dictionary keeps the order and drops repetitions
    for source, reference in zip(sources, references, strict=True):
        of_source[source][reference] = None
    return [[reference, *of_source[source]] for source, reference in zip(sources, references, strict=True)]


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    settings: ScoreSettings,
    metrics: Collection[str] | None = None,
) -> dict[str, float]:
    """Score detokenised hypotheses against one reference each, as sacreBLEU's command line scores NFC text."""
    return count(hypotheses, references, settings, metrics).scores()


@cache
def signatures(settings: ScoreSettings) -> Mapping[str, str]:
    """Return the signature of each metric of the settings. Raises UserError for an invalid setting."""
    return count([""], ["x"], settings).signatures


def tokenizer_for(languages: str) -> str:
    """Return sacreBLEU's tokenizer for a target language code such as "de", "zh-CN" or "jpn_Jpan". Several codes are
    separated by commas: if their tokenizers differ, it is 13a."""
    codes = languages.lower().replace("_", "-").split(",")
    tokenizers = {_TOKENIZER_OF_LANGUAGE.get(code.partition("-")[0], "13a") for code in codes}
    return tokenizers.pop() if len(tokenizers) == 1 else "13a"


def score_by_length(
    counts: Counts, metric: str, sources: Sequence[str], parts: int = 4
) -> list[dict[str, float | list[int]]]:
    """Score sentences in bins of increasing source length, from their statistics (N, k) of a metric.

    Sentences of the same length share a bin. The at most `parts` bins are otherwise as equal in size as possible.
    "words" holds a bin's shortest and longest length in words, or in characters if most sentences have no spaces, as in
    Chinese.
    """
    lengths = np.array([len(source.split()) for source in sources])
    if np.median(lengths) <= 1:
        lengths = np.array([len(source) for source in sources])
    longest, sizes = np.unique(lengths, return_counts=True)
    covered = np.cumsum(sizes) / len(lengths)  # fraction of the sentences that are at most as long
    edges = np.unique([longest[np.abs(covered - part / parts).argmin()] for part in range(1, parts + 1)])
    numbers = np.searchsorted(edges, lengths)
    bins: list[dict[str, float | list[int]]] = []
    for number in range(len(edges)):
        members = numbers == number
        words = [int(lengths[members].min()), int(lengths[members].max())]
        value = round(corpus_score(counts[members], metric), 4)
        bins.append({"words": words, "sentences": int(members.sum()), "score": value})
    return bins


def nfc(lines: Sequence[str]) -> list[str]:
    """Normalise lines to Unicode NFC (Normalization Form C)."""
    return [unicodedata.normalize("NFC", line) for line in lines]


def perplexity(nll: float, tokens: int) -> float:
    """Compute exp(nll / tokens) from a total negative log-likelihood in nats; return infinity if it overflows."""
    try:
        return math.exp(nll / max(1, tokens))
    except OverflowError:
        return math.inf


def _sacrebleu(scorer: BLEU | CHRF | TER, hypotheses: Sequence[str], answers: Answers) -> tuple[Counts, str]:
    references = [own for own, *_ in answers]
    counts = np.array(scorer._extract_corpus_statistics(hypotheses, [references]), dtype=np.int64)
    return counts, str(scorer.get_signature())
