"""Data diversification: whose translations the student learns, and that nothing is done twice."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

from nmt.data import demo

SCRIPT = Path(__file__).parents[1] / "scripts" / "diversify.py"
SHORT = [value for value in TINY if not value.startswith("data.")]
pytestmark = pytest.mark.system


def diversify(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_student_learns_what_both_directions_made(tmp_path: Path) -> None:
    for name, pairs in zip(("train", "valid"), demo.generate(150, 10, 1, 5), strict=False):
        for side, lang in enumerate(("en", "fr")):
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{pair[side]}\n" for pair in pairs))
    corpus = ["data=files", "data.train=train", "data.validation=valid", "data.target_lang=fr"]
    words = ["out", *corpus, *SHORT, "tokenizer.vocab_size=250", "training.max_steps=3", "data.cache_dir=cache"]
    words += ["search.max_length=8", "--search", "search=beam search.beam_size=1 search.max_length=8"]
    words += ["--student", "training.max_steps=4"]
    done = diversify(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    texts = [lines(tmp_path / f"train.{lang}") for lang in ("en", "fr")]
    made = list(zip(*(lines(out / "translations" / f"train.{lang}") for lang in ("en", "fr")), strict=True))
    forward, backward = (lines(out / name / "1.translations") for name in ("forward", "backward"))
    expected = [*zip(texts[0], forward, strict=True), *zip(backward, texts[1], strict=True)]
    assert made == [pair for pair in dict.fromkeys(expected) if all(pair) and pair not in zip(*texts, strict=True)]
    assert len(made) > 100
    configs = {name: (out / name / "config.yaml").read_text() for name in ("forward/1", "backward/1", "student")}
    assert "source_lang: en\n  target_lang: fr\n  extra: []" in configs["forward/1"]
    assert "source_lang: fr\n  target_lang: en\n  extra: []" in configs["backward/1"]
    assert f"extra:\n  - {out / 'translations' / 'train'}\n" in configs["student"]
    assert "max_steps: 4" in configs["student"]
    assert (out / "comparison" / "index.html").is_file()
    before = {path: path.read_bytes() for path in out.glob("**/metrics.jsonl")}
    assert len(before) == 3
    (out / "forward" / "1.translations").write_text("".join(f"{line} !\n" for line in forward))
    again = diversify(tmp_path, *words)
    assert again.returncode == 2, again.stderr
    assert "student: failed, see" in again.stderr  # its corpus is another now
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["out", "seed=1"], "data=demo: has one direction only"),
        (["out", "sead=1"], "error: sead: unknown key; did you mean"),
        (["out", "seed=1", "--models", "0"], "--models and --jobs must be at least 1"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str, tmp_path: Path) -> None:
    done = diversify(tmp_path, *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())
