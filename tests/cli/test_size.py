"""size=auto: the size of the corpus chooses, unless the command line names a size.

Values on the command line win over those of a size. Configurations composed in Python behave in the same way.
"""

import os
import sys
from pathlib import Path

import pytest
import quick_hydra
import yaml
from hydra._internal.hydra import Hydra

from nmt.cli import app
from nmt.cli.compose import compose
from nmt.config.compose import config_dir
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig

THRESHOLDS = yaml.safe_load((config_dir() / "size" / "auto.yaml").read_text(encoding="utf-8"))["thresholds"]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setattr(Hydra, "get_mode", quick_hydra.mode)


def composed(monkeypatch: pytest.MonkeyPatch, pairs: int, *given: str) -> tuple[TrainConfig, str]:
    """Run nmt-train's composition for a corpus of `pairs` pairs. Returns the configuration and the recorded size."""
    for language in ("en", "de"):
        Path(f"corpus.{language}").write_text("a\n" * pairs, encoding="utf-8")
    found: list[tuple[TrainConfig, str]] = []
    files = ("data=files", "data.train=corpus", "data.validation=corpus")
    monkeypatch.setattr(sys, "argv", ["nmt-train", *files, *given])
    os.environ["HYDRA_FULL_ERROR"] = ""
    with pytest.raises(SystemExit) as exit_:
        app.run_command("train", TrainConfig, lambda config, _: found.append((config, app.choices()["size"])))
    assert exit_.value.code == 0
    return found[0]


@pytest.mark.parametrize("size", THRESHOLDS)
def test_the_corpus_chooses_the_size(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    least = THRESHOLDS[size]
    if least > 200_000:  # without writing a large file
        monkeypatch.setattr("nmt.data.corpus.count_pairs", lambda _: least)
    config, chosen = composed(monkeypatch, max(1, min(least, 200_000)))
    asked, _ = composed(monkeypatch, 1, f"size={size}")
    assert chosen == size
    assert config == asked


def test_where_a_size_begins_is_a_value_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config, chosen = composed(monkeypatch, 5, "size.thresholds.base=5")
    assert chosen == "base"
    assert config == composed(monkeypatch, 5, "size=base")[0]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("size.thresholds.base=x", "size.thresholds.base=x: input should be a valid integer"),
        ("size.thresholds.small=9", "size.thresholds: no size begins at or below 5 training pairs; set one to 0"),
    ],
)
def test_wrong_beginnings_are_told(
    word: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):  # `composed` asserts success
        composed(monkeypatch, 5, word)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert line.startswith(f"nmt-train: error: {told}")


@pytest.mark.slow
def test_recipes_of_ones_own_are_found_for_every_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    given = [f"hydra.searchpath=[{tmp_path}/own]", "experiment=mine"]
    config, size = composed(monkeypatch, 3, *given)
    assert (config.seed, size) == (77, min(THRESHOLDS, key=lambda name: THRESHOLDS[name]))
    config, choices = compose(
        "train", TrainConfig, [*given, "data=files", "data.train=corpus", "data.validation=corpus"]
    )
    assert (config.seed, choices["size"]) == (77, size)
    with pytest.raises(UserError, match="experiment=mine: not one of attention_study"):
        compose("train", TrainConfig, ["experiment=mine"])
    with pytest.raises(UserError, match="tatoeba_de_en, mine; did you mean 'mine'"):
        compose("train", TrainConfig, [given[0], "experiment=mines"])
