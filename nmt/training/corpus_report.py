"""The report of a prepared corpus, as a run logs and records it: with the BLEU that the tokenizer leaves of it."""

import logging
from collections.abc import Mapping
from typing import Any

from nmt.config import schema
from nmt.data.prepared_corpus import PreparedCorpus, Split
from nmt.data.tokenizer import Tokenizer
from nmt.evaluate.metrics import ScoreSettings, nfc, score

ROUND_TRIPS = 2_000  # largest number of references per split whose round trip is scored; this takes a fifth of a second
MIN_BLEU = 99.0  # round trip BLEU below which the report warns
MIN_USED = 0.9  # fraction of training pairs that are used, below which the log warns
log = logging.getLogger(__name__)


def corpus_report(corpus: PreparedCorpus, config: schema.TrainConfig, settings: ScoreSettings) -> dict[str, Any]:
    """Return the report of a prepared corpus, with round_trip_bleu of each held-out split and a warning if it is low.

    round_trip_bleu is the BLEU of the references, after the tokenizer has encoded and decoded them, against the
    unchanged references. No model's translations are expected to score higher.
    """
    splits, warnings = dict(corpus.report["splits"]), list(corpus.report["warnings"])
    for split in corpus.held_out:
        bleu = round_trip_bleu(split, corpus.tokenizers.target, settings)
        splits[split.name] = {**splits[split.name], "round_trip_bleu": round(bleu, 4)}
        if bleu < MIN_BLEU:
            lowercase = config.tokenizer.lowercase and not config.evaluation.lowercase
            other = "another tokenizer.normalization, or tokenizer.byte_fallback=true"
            warnings.append(
                f"{split.name}: the references have BLEU {bleu:.2f} against themselves after the tokenizer has encoded "
                f"and decoded them, so all translations score too low; try "
                f"{'evaluation.lowercase=true' if lowercase else other}"
            )
    return {**corpus.report, "splits": splits, "warnings": warnings}


def round_trip_bleu(split: Split, tokenizer: Tokenizer, settings: ScoreSettings, sentences: int = ROUND_TRIPS) -> float:
    """Encode and decode up to `sentences` references; return the BLEU of the result against the references."""
    chosen = range(0, len(split), -(-len(split) // sentences))
    references = nfc([split.target.line(index) for index in chosen])
    decoded = nfc([tokenizer.decode(split.target.ids(index).tolist()) for index in chosen])
    if all(line.split() == reference.split() for line, reference in zip(decoded, references, strict=True)):
        return 100.0  # sacreBLEU gives less if no sentence has four words
    return score(decoded, references, settings, ("bleu",))["bleu"]


def log_corpus_report(report: Mapping[str, Any]) -> None:
    """Log the corpus report, with its warnings last."""
    log.info("corpus: %s to %s, vocabulary %s", *report["languages"], " and ".join(map(str, report["vocabulary"])))
    for name, split in report["splits"].items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in split["dropped"].items()) or "none"
        log.info(
            "  %-10s %8d pairs, dropped: %s; %s + %s tokens, longest %s, unknown %s%s%s",
            name,
            split["kept"],
            dropped,
            *(f"{tokens:,}" for tokens in split["tokens"]),
            "/".join(map(str, split["longest"])),
            "/".join(f"{100 * rate:.2f} %" for rate in split["unknown_rate"]),
            f"; {split['sources_in_train']} sources also in train" if "sources_in_train" in split else "",
            f"; round trip BLEU {split['round_trip_bleu']:.2f}" if "round_trip_bleu" in split else "",
        )
    train = report["splits"]["train"]
    if train["kept"] < MIN_USED * train["read"]:
        log.warning("corpus: only %d of %d training pairs are used", train["kept"], train["read"])
    for warning in report["warnings"]:
        log.warning("corpus: %s", warning)
