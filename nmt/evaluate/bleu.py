"""Translation quality: sacreBLEU's BLEU, chrF and TER (Post 2018), BLEU of sentences and by length, perplexity.

`count` collects sacreBLEU's statistics of each sentence. Every score is a formula of the sums of these statistics, so
that scores of subsets and of resampled sentences need no text. Texts are compared in Unicode NFC: composed and
decomposed characters are equal. Shapes: N sentences, k statistics of a metric.
"""

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR
from safetensors import SafetensorError
from safetensors.numpy import load, save

from nmt.system.files import read_bytes, write_atomically
from nmt.translate.similarity import Floats, bleu_score, chrf_score

Counts = NDArray[np.int64]
METRICS = ("bleu", "chrf", "ter")
WIDTHS = {"bleu": 10, "chrf": 18, "ter": 2}  # number k of each metric's statistics
SUFFIX = ".statistics.safetensors"  # test.statistics.safetensors holds the statistics of the output test.txt

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
    """sacreBLEU's option `--tokenize` for BLEU, and whether BLEU and chrF ignore case, which TER always does.

    With tokenizers that split Chinese or Japanese, TER splits these languages, too. All else is sacreBLEU's default.
    """

    tokenize: str
    lowercase: bool


def tokenizer_for(languages: str) -> str:
    """Return sacreBLEU's tokenizer for a target language code such as "de", "zh-CN" or "jpn_Jpan".

    For several codes, separated by commas, returns their common tokenizer, or 13a if they have different tokenizers.
    """
    codes = languages.lower().replace("_", "-").split(",")
    tokenizers = {_TOKENIZER_OF_LANGUAGE.get(code.partition("-")[0], "13a") for code in codes}
    return tokenizers.pop() if len(tokenizers) == 1 else "13a"


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF from 0 to 100, higher is better; TER in percent, lower is better.

    A score is None if its metric was not computed.
    """

    bleu: float
    chrf: float | None
    ter: float | None
    signature: str
    chrf_signature: str | None
    ter_signature: str | None

    def as_dict(self) -> dict[str, float | str | None]:
        """Return a flat dict for JSON, with scores rounded to 4 decimals."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Counted:
    """sacreBLEU's statistics of N sentences."""

    counts: Mapping[str, Counts]  # (N, k) by metric, with k from WIDTHS
    signatures: Mapping[str, str]  # sacreBLEU's signature by metric

    def scores(self) -> Scores:
        """Score all sentences together."""
        values = {name: float(FORMULAS[name](rows.sum(0))) for name, rows in self.counts.items()}
        signature, chrf_signature, ter_signature = map(self.signatures.get, METRICS)
        assert signature is not None
        return Scores(values["bleu"], values.get("chrf"), values.get("ter"), signature, chrf_signature, ter_signature)


def count(
    hypotheses: Sequence[str], references: Sequence[str], settings: ScoreSettings, metrics: Collection[str] = METRICS
) -> Counted:
    """Count sacreBLEU's statistics of detokenised hypotheses with one reference each.

    Raises ValueError if the numbers of hypotheses and references differ or are zero, or for an invalid setting or
    metric.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"cannot score {len(hypotheses)} hypotheses against {len(references)} references: "
            "their numbers must be equal and not zero"
        )
    if "bleu" not in metrics or not set(metrics) <= set(METRICS):
        raise ValueError(f"metrics: {sorted(metrics)}; allowed: bleu, with any of {', '.join(METRICS[1:])}")
    hypotheses, references = nfc(hypotheses), nfc(references)
    chosen = {name: metric for name, metric in _metrics(settings).items() if name in metrics}
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


@cache
def signatures(settings: ScoreSettings) -> Mapping[str, str]:
    """Return sacreBLEU's signature of each metric, which names sacreBLEU's version and the metric's options."""
    return count([""], ["x"], settings).signatures


def stored_counts(path: Path, hypotheses: Sequence[str], references: Sequence[str], settings: ScoreSettings) -> Counted:
    """Read the statistics of an output from the file `path`, because counting takes seconds per thousand sentences.

    If the file is missing, damaged or belongs to other texts or settings, count them and try to write the file.
    Raises ValueError as `count` does.
    """
    key = _key(hypotheses, references, signatures(settings))
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        arrays = load(read_bytes(path))
        counts = {name: arrays[name].astype(np.int64, casting="safe") for name in METRICS}
        shapes = {name: (len(references), width) for name, width in WIDTHS.items()}
        valid = shapes == {name: rows.shape for name, rows in counts.items()}
        if valid and arrays["key"].tobytes() == key and min(rows.min() for rows in counts.values()) >= 0:
            return Counted(counts, signatures(settings))
    counted = count(hypotheses, references, settings)
    write_counts(path, counted, hypotheses, references)
    return counted


def write_counts(path: Path, counted: Counted, hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Write the statistics of all metrics to the file `path`. If it cannot be written, do nothing."""
    arrays = {name: rows.astype(np.int32) for name, rows in counted.counts.items()}
    arrays["key"] = np.frombuffer(_key(hypotheses, references, counted.signatures), np.uint8)
    with suppress(OSError):
        write_atomically(path, save(arrays))


def _key(*texts: object) -> bytes:
    """Compute a digest of hypotheses, references and signatures."""
    return hashlib.sha256(json.dumps(texts).encode()).digest()


def ter_score(sums: Floats) -> Floats:
    """Compute TER from sums of edits and of reference lengths: (..., 2) -> (...), in percent (Snover et al. 2006)."""
    edits, length = sums[..., 0], sums[..., 1]
    return 100 * np.where(length > 0, edits / np.where(length > 0, length, 1.0), edits > 0)


def mean_score(sums: Floats) -> Floats:
    """Compute the mean of sentence scores from their sum and the number of sentences: (..., 2) -> (...)."""
    return np.asarray(sums[..., 0] / sums[..., 1])


FORMULAS: dict[str, Callable[[Floats], Floats]] = {
    "bleu": bleu_score,
    "chrf": chrf_score,
    "ter": ter_score,
    "comet": mean_score,
}


def sentence_bleu(counts: Counts) -> NDArray[np.float64]:
    """Compute the BLEU of each sentence from its statistics: (N, 10) -> (N,), from 0 to 100.

    Uses sacreBLEU's effective order: n-grams longer than the sentence do not count.
    """
    return bleu_score(counts.astype(float), effective_order=True)


def score_by_length(counts: Counts, sources: Sequence[str], parts: int = 4) -> list[dict[str, float | list[int]]]:
    """Compute BLEU, from its statistics (N, 10), for sentences in bins of increasing source length.

    There are at most `parts` bins, whose sizes are as equal as possible if sentences of the same length share a bin;
    there are fewer if many sentences have the same length. "words" holds a bin's shortest and longest length in words,
    or in characters if most sentences have no spaces, as in Chinese.
    """
    lengths = np.array([len(source.split()) for source in sources])
    if np.median(lengths) <= 1:
        lengths = np.array([len(source) for source in sources])
    longest, sizes = np.unique(lengths, return_counts=True)
    shares = np.cumsum(sizes) / len(lengths)  # share of the sentences that are at most as long
    edges = np.unique([longest[np.abs(shares - part / parts).argmin()] for part in range(1, parts + 1)])
    numbers = np.searchsorted(edges, lengths)
    bins: list[dict[str, float | list[int]]] = []
    for number in range(len(edges)):
        members = numbers == number
        words = [int(lengths[members].min()), int(lengths[members].max())]
        bleu = round(float(bleu_score(counts[members].sum(0))), 4)
        bins.append({"words": words, "sentences": int(members.sum()), "bleu": bleu})
    return bins


def nfc(lines: Sequence[str]) -> list[str]:
    """Normalise lines to Unicode NFC (Normalization Form C)."""
    return [unicodedata.normalize("NFC", line) for line in lines]


def _metrics(settings: ScoreSettings) -> dict[str, BLEU | CHRF | TER]:
    splits = settings.tokenize in _SPLITS_CHARACTERS
    ter = TER(normalized=splits, asian_support=splits)  # sacreBLEU splits characters only if it also normalises
    return {"bleu": bleu_metric(settings), "chrf": CHRF(lowercase=settings.lowercase), "ter": ter}


def bleu_metric(settings: ScoreSettings) -> BLEU:
    """Create sacreBLEU's BLEU. Raises ValueError if the tokenizer is unknown or not installed."""
    name = settings.tokenize
    if name not in BLEU.TOKENIZERS:
        raise ValueError(f"evaluation.tokenize: {name!r} is unknown; allowed: {', '.join(BLEU.TOKENIZERS)}")
    try:
        # `force` silences the warning that the text looks tokenized. Some corpora are tokenized on purpose.
        return BLEU(tokenize=name, lowercase=settings.lowercase, force=True)
    except RuntimeError as error:  # no dictionary for the Japanese or Korean tokenizer, or a damaged download
        if name in SPM_MODELS:
            file = Path(SACREBLEU_DIR, "models", Path(SPM_MODELS[name]["url"]).name)
            raise ValueError(
                f"evaluation.tokenize: {file} is damaged; delete it, so that it is downloaded again"
            ) from error
        package = f'"sacrebleu[{name.partition("-")[0]}]"'
        raise ValueError(f"evaluation.tokenize: {name!r} needs more packages: pip install {package}") from error
    except OSError as error:  # the SentencePiece tokenizers download their model once
        raise ValueError(
            f"evaluation.tokenize: {name!r} cannot download its model ({error}); try again or use another"
        ) from error


def perplexity(nll: float, tokens: int) -> float:
    """Compute exp(nll / tokens) from a total negative log-likelihood in nats; return infinity if it overflows."""
    try:
        return math.exp(nll / max(1, tokens))
    except OverflowError:
        return math.inf
