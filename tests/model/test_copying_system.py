"""Models that copy, from training to translation, through the commands that users run."""

import random
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase
from typing import Any

import pytest
from conftest import run_config
from trained import copying  # noqa: F401

from nmt import Translator
from nmt.explain.explanation import explain
from nmt.training.job import train

pytestmark = pytest.mark.system
WORDS = [
    "house/maison car/voiture street/rue table/table letter/lettre door/porte",
    "red/rouge large/large old/ancienne white/blanche yellow/jaune",
    "sees/voit sells/vend buys/achète paints/peint describes/décrit finds/trouve",
    "today/aujourd'hui often/souvent rarely/rarement now/maintenant",
]
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


def write_corpus(folder: Path) -> list[list[str]]:
    """Write the splits train, valid and test as .en and .fr. Each sentence has two names of random letters that occur
    nowhere else. Returns the names in each test sentence."""
    draw, names = random.Random(1), list[list[str]]()
    for split, size in (("train", 3000), ("valid", 100), ("test", 300)):
        names, texts = [], dict.fromkeys(("en", "fr"), "")
        for _ in range(size):
            a, b = ("".join(draw.choices(ascii_lowercase, k=draw.randint(6, 9))).capitalize() for _ in "ab")
            noun, adjective, verb, time = (draw.choice(pairs.split()).split("/") for pairs in WORDS)
            names.append([a, b])
            texts["en"] += f"{time[0]} {a} {verb[0]} the {adjective[0]} {noun[0]} of {b} .\n"
            texts["fr"] += f"{a} {verb[1]} {time[1]} la {noun[1]} {adjective[1]} de {b} .\n"
        for lang, text in texts.items():
            (folder / f"{split}.{lang}").write_text(text, encoding="utf-8")
    return names


@pytest.mark.slow
def test_names_that_were_never_read_are_copied(tmp_path: Path) -> None:
    """Copies at least nine in ten of the test set's names, where the same model without copying fails."""
    names = write_corpus(tmp_path)
    corpus = ["data=files", "data.source_lang=en", "data.target_lang=fr"]
    corpus += [f"data.{split}={tmp_path / split[:5]}" for split in ("train", "validation", "test")]
    sizes = ["tokenizer.vocab_size=1000", "embedding.dim=64", "encoder.hidden=64", "decoder.hidden=128"]
    lines = (tmp_path / "test.en").read_text(encoding="utf-8").splitlines()
    shares = {}
    for copies in ("true", "false"):
        run = tmp_path / copies
        given = [*corpus, "size=demo", *sizes, f"decoder.copy={copies}", "training.max_epochs=5"]
        assert train(run_config(*given), run) == 0
        found = zip(names, Translator.load(run).translate(lines), strict=True)
        shares[copies] = fmean(name in translation.text.split() for own, translation in found for name in own)
    assert shares["true"] > 0.9
    assert shares["false"] < 0.5
