"""What the tokenizer loses of the references is measured, and said with the remedy."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import values_of

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.data.prepare.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.evaluate.bleu import ScoreSettings
from nmt.training.logs import corpus_report
from nmt.training.logs.corpus_report import report_round_trips, round_trip_bleu

CHINESE = ["\u4f60\u597d\uff0c\u4e16\u754c\uff01", "\u4eca\u5929\uff08\u5468\u4e00\uff09\u4e0d\u6765\uff1f"]
PERSIAN = [
    "\u0645\u06cc\u200c\u0631\u0648\u0645 \u0628\u0647 \u062e\u0627\u0646\u0647 .",
    "\u06a9\u062a\u0627\u0628\u200c\u0647\u0627 \u0628\u0647 \u062e\u0627\u0646\u0647 \u0645\u06cc\u200c\u0631 .",
]
COMPOSED = ["le gar\u00e7on a \u00e9t\u00e9 l\u00e0 .", "il est d\u00e9\u00e7u , \u00e0 No\u00ebl ."]
FRENCH = [unicodedata.normalize("NFD", line) for line in COMPOSED]
LETTERS = ["a b c d e f g h", "A B C D E", "a\x01b c d e f g h"]
Make = Callable[..., tuple[Prepared, TrainConfig]]


@pytest.fixture
def prepared(tmp_path: Path) -> Make:
    """Prepares a corpus whose held-out targets are those of train, or others."""

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
    ("targets", "tokenize"), [(CHINESE, "zh"), (PERSIAN, "13a"), (FRENCH, "13a")], ids=["Chinese", "Persian", "NFD"]
)
def test_references_come_back_whole(targets: list[str], tokenize: str, prepared: Make) -> None:
    made, config = prepared(targets)
    report_round_trips(made, config, ScoreSettings(tokenize, lowercase=False))
    assert made.report["splits"]["validation"]["round_trip_bleu"] == 100
    assert "round_trip_bleu" not in made.report["splits"]["train"]
    assert not [warning for warning in made.report["warnings"] if "themselves" in warning]


@pytest.mark.parametrize(
    ("overrides", "targets", "held_out", "remedy"),
    [
        (["tokenizer.normalization=nmt_nfkc"], PERSIAN, PERSIAN, "tokenizer.normalization=nfc"),
        (["tokenizer.lowercase=true"], LETTERS, LETTERS[1:2], "evaluation.lowercase=true"),
        ([], LETTERS, ["\u4e16 b \u754c d e"], "tokenizer.byte_fallback=true"),
        ([], LETTERS, LETTERS[2:], "tokenizer.normalization=identity"),
    ],
)
def test_what_is_lost_is_said_with_the_remedy(
    overrides: list[str], targets: list[str], held_out: list[str], remedy: str, prepared: Make
) -> None:
    overrides = ["evaluation.lowercase=false", *overrides]
    made, config = prepared(targets, *overrides, held_out=held_out)
    report_round_trips(made, config, ScoreSettings("13a", config.evaluation.lowercase))
    bleu = made.report["splits"]["validation"]["round_trip_bleu"]
    (warning,) = [warning for warning in made.report["warnings"] if "themselves" in warning]
    assert warning.startswith(f"validation: the references have BLEU {bleu:.2f} against themselves")
    assert warning.endswith(f"; try {remedy}")
    better, config = prepared(targets, *overrides, remedy, held_out=held_out)
    report_round_trips(better, config, ScoreSettings("13a", config.evaluation.lowercase))
    assert better.report["splits"]["validation"]["round_trip_bleu"] == pytest.approx(100)


def test_a_large_split_costs_no_more_than_a_part_of_it(prepared: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = prepared(["a b c d e f"] * 25)
    decoded = []
    tokenizer = made.tokenizers.target
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or "a b c d e f")
    monkeypatch.setattr(corpus_report, "SENTENCES", 10)
    assert round_trip_bleu(made.splits["validation"], tokenizer, ScoreSettings("13a", lowercase=False)) == 100
    assert 5 < len(decoded) <= 10
