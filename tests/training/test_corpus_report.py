"""The corpus report: what references lose in the tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import run_config

from nmt.config.schema import TrainConfig
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus
from nmt.evaluate.metrics import ScoreSettings
from nmt.training.corpus_report import corpus_report, round_trip_bleu

Make = Callable[..., tuple[PreparedCorpus, TrainConfig]]


@pytest.fixture
def prepared(tmp_path: Path) -> Make:
    """Return a function that prepares a corpus; its held-out targets are the training targets or `held_out`."""

    def make(
        targets: list[str], *overrides: str, held_out: list[str] | None = None
    ) -> tuple[PreparedCorpus, TrainConfig]:
        for name, lines in (("train", targets), ("valid", held_out or targets)):
            (tmp_path / f"{name}.en").write_text("".join(f"line {n} here\n" for n in range(len(lines))))
            (tmp_path / f"{name}.xx").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        files = [f"data.{key}={tmp_path}/{name}" for key, name in (("train", "train"), ("validation", "valid"))]
        words = ["data=files", "data.target_lang=xx", *files, f"data.cache_dir={tmp_path}/cache", "tokenizer=char"]
        config = run_config(*words, *overrides)
        return prepare(config.data, config.tokenizer), config

    return make


LIGATURES = ["\ufb01n \xbd m\xb2 \uff21", "\ufb01l \xbd km\xb2 \uff21"]
NORMALIZATION = "another tokenizer.normalization, or tokenizer.byte_fallback=true"


@pytest.mark.parametrize(
    ("overrides", "targets", "held_out", "advice", "remedy"),
    [
        (["tokenizer.normalization=nfkc"], LIGATURES, LIGATURES, NORMALIZATION, "tokenizer.normalization=nfc"),
        (["tokenizer.lowercase=true"], ["a b c d e", "A B"], ["A B C D E"], *2 * ["evaluation.lowercase=true"]),
        ([], ["a b c d e"], ["\u4e16 b \u754c d e"], NORMALIZATION, "tokenizer.byte_fallback=true"),
    ],
)
def test_what_the_tokenizer_loses_is_said_with_the_remedy(
    overrides: list[str], targets: list[str], held_out: list[str], advice: str, remedy: str, prepared: Make
) -> None:
    for more, warned in ([], True), ([remedy], False):
        made, config = prepared(targets, "evaluation.lowercase=false", *overrides, *more, held_out=held_out)
        report = corpus_report(made, config, ScoreSettings("13a", config.evaluation.lowercase))
        bleu = report["splits"]["validation"]["round_trip_bleu"]
        expected = f"validation: the references have BLEU {bleu:.2f} against themselves"
        warnings = [warning for warning in report["warnings"] if "themselves" in warning]
        assert len(warnings) == warned
        assert all(each.startswith(expected) and each.endswith(f"; try {advice}") for each in warnings)
        assert warned or bleu == pytest.approx(100)
        assert "round_trip_bleu" not in report["splits"]["train"]


def test_of_a_large_split_a_part_is_enough(prepared: Make) -> None:
    """Every second of twelve sentences loses characters in the tokenizer. A sample of six contains none of these."""
    made, _ = prepared(["a b c d e f"], held_out=["a b c d e f", "\u4e16 \u754c b c d e"] * 6)
    settings, tokenizer = ScoreSettings("13a", lowercase=False), made.tokenizers.target
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings, sentences=6) == 100
    assert round_trip_bleu(made.splits["validation"], tokenizer, settings) < 100
