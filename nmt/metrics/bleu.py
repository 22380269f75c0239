"""Corpus scores."""

import math
import unicodedata
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER

METRICS = ("bleu", "chrf", "ter")

# ISO 639-1 and 639-3 codes of the languages that sacreBLEU segments with a tokenizer of their own.
_TOKENIZER_OF_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
}


@dataclass(frozen=True)
class ScoreSettings:
    """sacreBLEU's options `--tokenize` and `--lowercase`, which both concern BLEU alone.

    chrF is case-sensitive and needs no tokenizer, TER ignores case; their signatures say so.
    """

    tokenize: str
    lowercase: bool


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF from 0 to 100, higher is better; TER in percent, lower is better; None: not asked for."""

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


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    settings: ScoreSettings,
    metrics: Collection[str] = METRICS,
) -> Scores:
    """Score detokenised hypotheses against one reference each, exactly as sacreBLEU's command line does for NFC text.

    Raises ValueError if the counts differ or are zero, or if a setting or metric cannot be used.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"cannot score {len(hypotheses)} hypotheses against {len(references)} references: "
            "their numbers must be equal and not zero"
        )
    if "bleu" not in metrics or not set(metrics) <= set(METRICS):
        raise ValueError(f"metrics: {sorted(metrics)}; allowed: bleu, with any of {', '.join(METRICS[1:])}")
    hypotheses, references = nfc(hypotheses), nfc(references)

    def corpus_score(metric: BLEU | CHRF | TER) -> tuple[float, str]:
        value = float(metric.corpus_score(hypotheses, [references]).score)
        return value, str(metric.get_signature())

    bleu, signature = corpus_score(bleu_metric(settings))
    chrf, chrf_signature = corpus_score(CHRF()) if "chrf" in metrics else (None, None)
    ter, ter_signature = corpus_score(TER()) if "ter" in metrics else (None, None)
    return Scores(bleu, chrf, ter, signature, chrf_signature, ter_signature)


def signatures(settings: ScoreSettings) -> dict[str, str]:
    """What tells how each metric was taken: signature (of BLEU), chrf_signature, ter_signature."""
    empty = score([""], ["x"], settings)
    return {name: str(getattr(empty, name)) for name in ("signature", "chrf_signature", "ter_signature")}


def sentence_bleu(hypotheses: Sequence[str], references: Sequence[str], settings: ScoreSettings) -> list[float]:
    """BLEU of each sentence, from 0 to 100, with n-grams no longer than it has (sacreBLEU's effective order)."""
    metric = bleu_metric(settings, effective_order=True)
    pairs = zip(nfc(hypotheses), nfc(references), strict=True)
    return [float(metric.sentence_score(hypothesis, [reference]).score) for hypothesis, reference in pairs]


def score_by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    settings: ScoreSettings,
    count: int = 4,
) -> list[dict[str, float | list[int]]]:
    """BLEU of each quarter (or `count`th) of the sentences, by their sources' number of words; the longest are last.

    Sentences of one length stay together, so that there may be fewer parts. `words`: from and to; they are
    characters where the text has no spaces, as in Chinese.
    """
    lengths = np.array([len(source.split()) for source in sources])
    if np.median(lengths) <= 1:
        lengths = np.array([len(source) for source in sources])
    edges = np.unique(np.quantile(lengths, np.arange(1, count + 1) / count, method="lower"))
    parts: list[dict[str, float | list[int]]] = []
    for part in range(len(edges)):
        chosen = np.flatnonzero(np.searchsorted(edges, lengths) == part)
        texts = [[side[int(i)] for i in chosen] for side in (hypotheses, references)]
        words = [int(lengths[chosen].min()), int(lengths[chosen].max())]
        parts.append(
            {
                "words": words,
                "sentences": len(chosen),
                "bleu": round(score(texts[0], texts[1], settings, ("bleu",)).bleu, 4),
            }
        )
    return parts


def nfc(lines: Sequence[str]) -> list[str]:
    """The lines in Unicode NFC (Normalization Form C)."""
    return [unicodedata.normalize("NFC", line) for line in lines]


def bleu_metric(settings: ScoreSettings, effective_order: bool = False) -> BLEU:
    """The BLEU metric of the settings, or a ValueError that says how to get its tokenizer."""
    name = settings.tokenize
    if name not in BLEU.TOKENIZERS:
        raise ValueError(f"evaluation.tokenize: {name!r} is unknown; allowed: {', '.join(BLEU.TOKENIZERS)}")
    try:
        # `force` silences the warning that the text looks tokenized: some corpora are, on purpose.
        return BLEU(tokenize=name, lowercase=settings.lowercase, force=True, effective_order=effective_order)
    except RuntimeError as error:  # the Japanese and Korean tokenizers lack their dictionary
        extra = name.partition("-")[0]
        raise ValueError(f'evaluation.tokenize: {name!r} needs more packages: pip install "nmt[{extra}]"') from error
    except OSError as error:  # the SentencePiece tokenizers download their model once
        raise ValueError(
            f"evaluation.tokenize: {name!r} cannot download its model ({error}); try again or use another"
        ) from error


ORDER = 4


class TokenBLEU:
    """BLEU (Papineni et al. 2002) of candidates for one reference, as sacreBLEU takes it for a sentence: the n-th
    order without a match counts 1 / 2^k for the k-th such order, and no order longer than the candidate counts."""

    def __init__(self, reference: Sequence[Hashable]) -> None:
        self._length = len(reference)
        self._counts = [_ngrams(reference, n) for n in range(1, ORDER + 1)]

    def __call__(self, candidate: Sequence[Hashable]) -> float:
        """From 0 to 1."""
        if not candidate:
            return 0.0
        logarithms, halved, any_match = [], 1.0, False
        for n, wanted in enumerate(self._counts[: len(candidate)], 1):
            found = _ngrams(candidate, n)
            matches = sum(min(count, wanted[gram]) for gram, count in found.items() if gram in wanted)
            any_match = any_match or matches > 0
            if not matches:
                halved /= 2
            logarithms.append(math.log((matches or halved) / (len(candidate) - n + 1)))
        brevity = min(0.0, 1 - self._length / len(candidate))
        return math.exp(brevity + sum(logarithms) / len(logarithms)) if any_match else 0.0


def _ngrams(tokens: Sequence[Hashable], n: int) -> "Counter[tuple[Hashable, ...]]":
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False))


def perplexity(nll: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood; infinity where it does not fit a float."""
    try:
        return math.exp(nll / max(1, tokens))
    except OverflowError:
        return math.inf
