"""The corpus report: what references lose in the tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import values_of

from nmt.config.schema import TrainConfig
from nmt.config.validation import validated
from nmt.data.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.evaluate.metrics import ScoreSettings
from nmt.training.corpus_report import corpus_report, round_trip_bleu

# The corpus report: what references lose in the tokenizer

LIGATURES = ["\ufb01n \xbd m\xb2 \uff21", "\ufb01l \xbd km\xb2 \uff21"]

SPELLED_IN_NFKD = ["source.kind=char", "target.kind=word", "target.normalization=nfkd"]

LETTERS = ["a b c d e f g h", "A B C D E", "a\x01b c d e f g h"]

Make = Callable[..., tuple[Prepared, TrainConfig]]


@pytest.fixture
def prepared(tmp_path: Path) -> Make:
    """Return a function that prepares a corpus; its held-out targets are the training targets or `held_out`."""

    def make(targets: list[str], *overrides: str, held_out: list[str] | None = None) -> tuple[Prepared, TrainConfig]:
        for name, lines in (("train", targets), ("valid", held_out or targets)):
            (tmp_path / f"{name}.en").write_text("".join(f"line {n} here\n" for n in range(len(lines))))
            (tmp_path / f"{name}.xx").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        files = [f"data.{key}={tmp_path}/{name}" for key, name in (("train", "train"), ("validation", "valid"))]
        words = ["data=files", "data.target_lang=xx", *files, f"data.cache_dir={tmp_path}/cache", "tokenizer=char"]
        config = validated(TrainConfig, values_of("train", [*words, *overrides]))
        return prepare(config.data, config.tokenizer), config

    return make


@pytest.mark.parametrize(
    ("overrides", "targets", "held_out", "remedy"),
    [
        (["tokenizer.normalization=nfkc"], LIGATURES, LIGATURES, "tokenizer.normalization=nfc"),
        (
            ["tokenizer=sides", *(f"tokenizer.{key}" for key in SPELLED_IN_NFKD)],
            LIGATURES,
            LIGATURES,
            "tokenizer.target.normalization=nfc",
        ),
        (["tokenizer.lowercase=true"], LETTERS, LETTERS[1:2], "evaluation.lowercase=true"),
        ([], LETTERS, ["\u4e16 b \u754c d e"], "tokenizer.byte_fallback=true"),
        ([], LETTERS, LETTERS[2:], "tokenizer.normalization=none"),
    ],
)
def test_what_is_lost_is_said_with_the_remedy(
    overrides: list[str], targets: list[str], held_out: list[str], remedy: str, prepared: Make
) -> None:
    overrides = ["evaluation.lowercase=false", *overrides]
    made, config = prepared(targets, *overrides, held_out=held_out)
    report = corpus_report(made, config, ScoreSettings("13a", config.evaluation.lowercase))
    bleu = report["splits"]["validation"]["round_trip_bleu"]
    (warning,) = [warning for warning in report["warnings"] if "themselves" in warning]
    assert warning.startswith(f"validation: the references have BLEU {bleu:.2f} against themselves")
    assert warning.endswith(f"; try {remedy}")
    better, config = prepared(targets, *overrides, remedy, held_out=held_out)
    report = corpus_report(better, config, ScoreSettings("13a", config.evaluation.lowercase))
    assert report["splits"]["validation"]["round_trip_bleu"] == pytest.approx(100)
    assert "round_trip_bleu" not in report["splits"]["train"]
    assert not [warning for warning in report["warnings"] if "themselves" in warning]


def test_of_a_large_split_a_part_is_enough(prepared: Make) -> None:
    """Every second of twelve sentences loses characters in the tokenizer. A sample of six contains none of these."""
    made, _ = prepared(["a b c d e f"], held_out=["a b c d e f", "\u4e16 \u754c b c d e"] * 6)
    settings, tokenizer = ScoreSettings("13a", lowercase=False), made.tokenizers.target
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings, sentences=6) == 100
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings) < 100
