"""size=auto: the size of the corpus chooses, unless the command line names a size.

Values on the command line win over those of a size. Configurations composed in Python behave in the same way.
"""

import re
from pathlib import Path

import pytest
import yaml

from nmt.cli.start import new_run
from nmt.config.compose import config_dir
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig

THRESHOLDS = yaml.safe_load((config_dir() / "size" / "auto.yaml").read_text(encoding="utf-8"))["thresholds"]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def composed(pairs: int, *given: str) -> tuple[TrainConfig, str]:
    """Run nmt-train's composition for a corpus of `pairs` pairs. Returns the configuration and the recorded size."""
    for language in ("en", "de"):
        Path(f"corpus.{language}").write_text("a\n" * pairs, encoding="utf-8")
    start = new_run(["data=files", "data.train=corpus", "data.validation=corpus", *given])
    return start.config, start.choices["size"]


@pytest.mark.parametrize("size", THRESHOLDS)
def test_the_corpus_chooses_the_size(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    least = THRESHOLDS[size]
    if least > 200_000:  # without writing a large file
        monkeypatch.setattr("nmt.data.corpus.count_pairs", lambda _: least)
    config, chosen = composed(max(1, min(least, 200_000)))
    asked, _ = composed(1, f"size={size}")
    assert chosen == size
    assert config == asked


def test_where_a_size_begins_is_a_value_like_others() -> None:
    config, chosen = composed(5, "size.thresholds.base=5")
    assert chosen == "base"
    assert config == composed(5, "size=base")[0]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("size.thresholds.base=x", "size.thresholds.base=x: input should be a valid integer"),
        ("size.thresholds.small=9", "size.thresholds: no size begins at or below 5 training pairs; set one to 0"),
    ],
)
def test_wrong_beginnings_are_told(word: str, told: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(told)}"):
        composed(5, word)
