"""Models that copy, from training to translation, through the commands that users run."""

from pathlib import Path
from typing import Any

import names
import pytest
from conftest import run_config
from trained import copying  # noqa: F401

from nmt import Translator
from nmt.explain.explanation import explain
from nmt.training.job import train

pytestmark = pytest.mark.system
LINES = ["often Xqzvw sees the red house of Kjhgf .", "", "now", "rarely Aab buys the old car of Zzyx ."]


@pytest.mark.parametrize(
    "search",
    [{"kind": "greedy"}, {"beam_size": 3}, {"kind": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0}],
    ids=["greedy", "beam", "sampling"],
)
def test_translations_score_what_an_explanation_says(copying: Path, search: dict[str, Any]) -> None:  # noqa: F811
    translator = Translator.load(copying, search=search)
    for line, found in zip(LINES, translator.translate(LINES), strict=True):
        if line:
            explained = explain(translator, line, found.tokens)
            assert explained.token_log_probs == pytest.approx(found.token_log_probs, abs=1e-4)
    shares = explain(translator, LINES[0], LINES[3]).saliency
    assert shares is not None
    assert shares.sum(1) == pytest.approx(1)


@pytest.mark.slow
def test_names_that_were_never_read_are_copied(tmp_path: Path) -> None:
    """Copies at least nine in ten of the test set's names, where the same model without copying fails."""
    of_sentences = names.write_corpus(tmp_path)
    known = (tmp_path / "train.en").read_text(encoding="utf-8").split()
    assert not {name for own in of_sentences for name in own} & set(known)
    corpus = ["data=files", "data.source_lang=en", "data.target_lang=fr"]
    corpus += [f"data.{split}={tmp_path / split[:5]}" for split in ("train", "validation", "test")]
    sizes = ["tokenizer.vocab_size=1000", "embedding.dim=64", "encoder.hidden=64", "decoder.hidden=128"]
    lines = (tmp_path / "test.en").read_text(encoding="utf-8").splitlines()
    shares = {}
    for copies in ("true", "false"):
        run = tmp_path / copies
        given = [*corpus, "size=demo", *sizes, f"decoder.copy={copies}", "training.max_epochs=5"]
        assert train(run_config(*given), run) == 0
        texts = [translation.text for translation in Translator.load(run).translate(lines)]
        shares[copies] = names.share_of_names(of_sentences, texts)
    assert shares["true"] > 0.9
    assert shares["false"] < 0.5
