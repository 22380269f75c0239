"""Translation quality: BLEU, chrF and TER of a corpus with sacreBLEU (Post 2018), BLEU of sentences, perplexity.

sacreBLEU scores are computed in Unicode NFC, so that composed and decomposed characters are equal.
"""

import math
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

from nmt.evaluate import formulas

Counts = NDArray[np.int64]
METRICS = ("bleu", "chrf", "ter")

# sacreBLEU's tokenizers for single languages, by ISO 639-1 and 639-3 codes.
_TOKENIZER_OF_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
}


@dataclass(frozen=True)
class ScoreSettings:
    """sacreBLEU's options `--tokenize` and `--lowercase` for BLEU. chrF and TER use sacreBLEU's defaults."""

    tokenize: str
    lowercase: bool

    def of(self, language: str) -> "ScoreSettings":
        """The settings for one of several target languages."""
        return self


class SettingsByLanguage(ScoreSettings):
    """Settings of several target languages, each with its own tokenizer. `tokenize` is for their concatenated text."""

    def of(self, language: str) -> ScoreSettings:
        """The settings with the language's tokenizer."""
        return ScoreSettings(tokenizer_for(language), self.lowercase)


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF from 0 to 100, higher is better; TER in percent, lower is better. None: not computed."""

    bleu: float
    chrf: float | None
    ter: float | None
    signature: str
    chrf_signature: str | None
    ter_signature: str | None

    def as_dict(self) -> dict[str, float | str | None]:
        """Flat and ready for JSON, scores rounded to 4 decimals."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def tokenizer_for(language: str) -> str:
    """sacreBLEU's tokenizer for a target language code such as "de", "zh-CN" or "jpn_Jpan"."""
    primary = language.lower().replace("_", "-").partition("-")[0]
    return _TOKENIZER_OF_LANGUAGE.get(primary, "13a")


@dataclass(frozen=True)
class Counted:
    """sacreBLEU's statistics of N sentences by metric, (N, k) each: BLEU 10, chrF 18, TER 2 (nmt.evaluate.formulas)."""

    counts: Mapping[str, Counts]
    signatures: Mapping[str, str]

    def scores(self) -> Scores:
        """The scores of all sentences together."""
        values = {name: float(formulas.FORMULAS[name](rows.sum(0))) for name, rows in self.counts.items()}
        signature, chrf_signature, ter_signature = map(self.signatures.get, METRICS)
        assert signature is not None
        return Scores(values["bleu"], values.get("chrf"), values.get("ter"), signature, chrf_signature, ter_signature)


def count(
    hypotheses: Sequence[str], references: Sequence[str], settings: ScoreSettings, metrics: Collection[str] = METRICS
) -> Counted:
    """The statistics of detokenised hypotheses with one reference each, in Unicode NFC.

    Raises ValueError if the counts differ or are zero, or for an invalid setting or metric.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"cannot score {len(hypotheses)} hypotheses against {len(references)} references: "
            "their numbers must be equal and not zero"
        )
    if "bleu" not in metrics or not set(metrics) <= set(METRICS):
        raise ValueError(f"metrics: {sorted(metrics)}; allowed: bleu, with any of {', '.join(METRICS[1:])}")
    hypotheses, references = nfc(hypotheses), nfc(references)
    known: dict[str, BLEU | CHRF | TER] = {"bleu": bleu_metric(settings), "chrf": CHRF(), "ter": TER()}
    chosen = {name: metric for name, metric in known.items() if name in metrics}
    counts = {
        name: np.array(metric._extract_corpus_statistics(hypotheses, [references]), dtype=np.int64)
        for name, metric in chosen.items()
    }
    return Counted(counts, {name: str(metric.get_signature()) for name, metric in chosen.items()})


def score(
    hypotheses: Sequence[str], references: Sequence[str], settings: ScoreSettings, metrics: Collection[str] = METRICS
) -> Scores:
    """Score detokenised hypotheses against one reference each, as sacreBLEU's command line scores NFC text.

    Raises ValueError as `count` does.
    """
    return count(hypotheses, references, settings, metrics).scores()


def signatures(settings: ScoreSettings) -> dict[str, str]:
    """sacreBLEU's signatures: signature (of BLEU), chrf_signature and ter_signature."""
    scores = score([""], ["x"], settings)
    return {name: str(getattr(scores, name)) for name in ("signature", "chrf_signature", "ter_signature")}


def sentence_bleu(counts: Counts) -> NDArray[np.float64]:
    """Statistics of BLEU (N, 10) -> BLEU of each sentence (N,), from 0 to 100, with sacreBLEU's effective order:
    n-grams no longer than the sentence."""
    return formulas.bleu(counts.astype(float), effective_order=True)


def score_by_length(counts: Counts, sources: Sequence[str], parts: int = 4) -> list[dict[str, float | list[int]]]:
    """BLEU by source length, from its statistics (N, 10), in `parts` bins of about equal size, the longest last.

    Sentences of equal length share a bin, so there may be fewer bins. "words" holds a bin's shortest and longest
    length; it counts characters in text without spaces, such as Chinese.
    """
    lengths = np.array([len(source.split()) for source in sources])
    if np.median(lengths) <= 1:
        lengths = np.array([len(source) for source in sources])
    edges = np.unique(np.quantile(lengths, np.arange(1, parts + 1) / parts, method="lower"))
    numbers = np.searchsorted(edges, lengths)
    bins: list[dict[str, float | list[int]]] = []
    for number in range(len(edges)):
        members = numbers == number
        words = [int(lengths[members].min()), int(lengths[members].max())]
        bleu = round(float(formulas.bleu(counts[members].sum(0))), 4)
        bins.append({"words": words, "sentences": int(members.sum()), "bleu": bleu})
    return bins


def nfc(lines: Sequence[str]) -> list[str]:
    """The lines in Unicode NFC (Normalization Form C)."""
    return [unicodedata.normalize("NFC", line) for line in lines]


def bleu_metric(settings: ScoreSettings, effective_order: bool = False) -> BLEU:
    """sacreBLEU's BLEU. Raises ValueError if the tokenizer is unknown or not installed."""
    name = settings.tokenize
    if name not in BLEU.TOKENIZERS:
        raise ValueError(f"evaluation.tokenize: {name!r} is unknown; allowed: {', '.join(BLEU.TOKENIZERS)}")
    try:
        # `force` silences the warning that the text looks tokenized, which some corpora are on purpose.
        return BLEU(tokenize=name, lowercase=settings.lowercase, force=True, effective_order=effective_order)
    except RuntimeError as error:  # no dictionary for the Japanese or Korean tokenizer
        extra = name.partition("-")[0]
        raise ValueError(f'evaluation.tokenize: {name!r} needs more packages: pip install "nmt[{extra}]"') from error
    except OSError as error:  # the SentencePiece tokenizers download their model once
        raise ValueError(
            f"evaluation.tokenize: {name!r} cannot download its model ({error}); try again or use another"
        ) from error


def perplexity(nll: float, tokens: int) -> float:
    """exp(nll / tokens), of a total negative log-likelihood in nats; infinite if it overflows a float."""
    try:
        return math.exp(nll / max(1, tokens))
    except OverflowError:
        return math.inf
