"""What scripts know of runs before they start them."""

from pathlib import Path

import pytest

from nmt.cli.compose import preview
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig


def test_a_recipe_of_ones_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptimizer:\n  lr: 0.0012\n")
    config = preview("train", TrainConfig, [f"hydra.searchpath=[{tmp_path}]", "experiment=mine", "seed=7"])
    assert (config.optimizer.lr, config.seed) == (0.0012, 7)
    with pytest.raises(UserError, match="experiment=mine: not one of attention_study"):
        preview("train", TrainConfig, ["experiment=mine"])


def test_a_size_that_the_corpus_decides_is_the_small_one() -> None:
    files = ["data=files", "data.train=a", "data.validation=b"]
    small, auto, base = (preview("train", TrainConfig, [*files, *size]) for size in (["size=small"], [], ["size=base"]))
    assert auto == small != base


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=1,2", "seed=1,2: several values need a sweep, which this is not"),
        ("sead=1", "sead: unknown key; did you mean 'seed'"),
        ("data=files", "data.train: missing; give it as data.train=..."),
    ],
)
def test_what_the_command_would_refuse_is_refused(override: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        preview("train", TrainConfig, [override])
