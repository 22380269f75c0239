"""What the tokenizer loses of the references: the BLEU of references that were encoded and decoded, against themselves.

No model's translations can be closer to the references than these.
"""

from nmt.config import schema
from nmt.data.prepared import Prepared, Split
from nmt.data.tokenizer import Tokenizer
from nmt.metrics.bleu import ScoreSettings, nfc, score

SENTENCES = 2_000  # of a split, evenly spread, that are scored: a fifth of a second
LEAST = 99.0  # BLEU below which the corpus report warns


def report_round_trips(prepared: Prepared, config: schema.TrainConfig, settings: ScoreSettings) -> None:
    """Add round_trip_bleu of each held-out split to the corpus report, and a warning where it is low."""
    warnings = list(prepared.report["warnings"])
    for split in prepared:
        if split.name == "train":
            continue
        report = prepared.report["splits"][split.name]
        bleu = round_trip_bleu(split, prepared.tokenizers.target, settings)
        report["round_trip_bleu"] = round(bleu, 4)
        if bleu < LEAST:
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
    if all(ours.split() == theirs.split() for ours, theirs in zip(decoded, references, strict=True)):
        return 100.0  # BLEU is lower if no sentence has four words
    return score(decoded, references, settings, ("bleu",)).bleu


def _remedy(config: schema.TrainConfig, unknown_rate: float) -> str:
    """Values with which more of the references comes back, or with which BLEU ignores the difference."""
    tokenizer = config.tokenizer
    if tokenizer.lowercase and not config.evaluation.lowercase:
        return "evaluation.lowercase=true"
    if isinstance(tokenizer, schema.FileTokenizer):
        return "a tokenizer trained here (tokenizer=bpe)"
    values = ["tokenizer.byte_fallback=true"] if unknown_rate else []
    if tokenizer.normalization not in {"nfc", "identity"}:
        values.append("tokenizer.normalization=nfc")
    return " ".join(values) or "tokenizer.normalization=identity"
