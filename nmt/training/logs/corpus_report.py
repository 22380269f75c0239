"""The corpus report in the log, with the BLEU that the tokenizer costs."""

import logging

from nmt.config import schema
from nmt.config.schema.data import FileTokenizer
from nmt.data.prepared import Prepared, Split
from nmt.data.tokenizer import Tokenizer
from nmt.evaluate.bleu import ScoreSettings, nfc, score

SENTENCES = 2_000  # of a split, evenly spread, that are scored: takes a fifth of a second
MIN_BLEU = 99.0  # the report warns below it
MIN_USED = 0.9  # share of the training pairs; the report warns below it
log = logging.getLogger(__name__)


def log_corpus_report(prepared: Prepared) -> None:
    """Write the corpus report to the log, warnings last."""
    report = prepared.report
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


def report_round_trips(prepared: Prepared, config: schema.TrainConfig, settings: ScoreSettings) -> None:
    """Add round_trip_bleu of each held-out split to the corpus report, and a warning where it is low.

    It is the BLEU of the references after the tokenizer has encoded and decoded them, against themselves: an upper
    bound for every model's translations.
    """
    warnings = list(prepared.report["warnings"])
    for split in prepared:
        if split.name == "train":
            continue
        report = prepared.report["splits"][split.name]
        bleu = round_trip_bleu(split, prepared.tokenizers.target, settings)
        report["round_trip_bleu"] = round(bleu, 4)
        if bleu < MIN_BLEU:
            warnings.append(
                f"{split.name}: the references have BLEU {bleu:.2f} against themselves after the tokenizer has encoded "
                f"and decoded them, so all translations score too low; try {_remedy(config, report['unknown_rate'][1])}"
            )
    prepared.report["warnings"] = warnings


def round_trip_bleu(split: Split, tokenizer: Tokenizer, settings: ScoreSettings) -> float:
    """BLEU of up to SENTENCES references, encoded and decoded, against themselves."""
    chosen = range(0, len(split), -(-len(split) // SENTENCES))
    references = nfc([split.target.line(index) for index in chosen])
    decoded = nfc([tokenizer.decode(split.target.ids(index).tolist()) for index in chosen])
    if all(line.split() == reference.split() for line, reference in zip(decoded, references, strict=True)):
        return 100.0  # sacreBLEU gives less if no sentence has four words
    return score(decoded, references, settings, ("bleu",)).bleu


def _remedy(config: schema.TrainConfig, unknown_rate: float) -> str:
    """Values with which more of each reference survives, or with which BLEU ignores the difference."""
    tokenizer = config.tokenizer
    if tokenizer.lowercase and not config.evaluation.lowercase:
        return "evaluation.lowercase=true"
    if isinstance(tokenizer, FileTokenizer):
        return "a tokenizer trained on this corpus (tokenizer=bpe)"
    values = ["tokenizer.byte_fallback=true"] if unknown_rate else []
    if tokenizer.normalization not in {"nfc", "identity"}:
        values.append("tokenizer.normalization=nfc")
    return " ".join(values) or "tokenizer.normalization=identity"
