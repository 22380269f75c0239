"""Training works: a small model learns the demo corpus and aligns it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nmt.config.schema import TrainConfig
from nmt.training.job import train

pytestmark = [pytest.mark.system, pytest.mark.slow]

SMALL = [
    "attention=luong_general",
    "decoder.input_feeding=false",
    "search.max_length=80",
    "data.train_size=3000",
    "data.validation_size=60",
    "data.test_size=60",
    "tokenizer=word",
    "tokenizer.vocab_size=1000",
    "embedding.dim=64",
    "encoder.hidden=64",
    "decoder.hidden=128",
    "training.max_epochs=8",
    "training.label_smoothing=0.0",
    "embedding.dropout=0.1",
    "encoder.dropout=0.1",
    "decoder.dropout=0.1",
    "validation.every=8",
]


def results(config: TrainConfig, directory: Path) -> dict[str, float]:
    assert train(config, directory, []) == 0
    test: dict[str, float] = json.loads((directory / "results.json").read_text())["test"]
    return test


@pytest.mark.parametrize(
    ("more", "least"),
    [
        (["training.batch_tokens=1024", "optimizer.lr=0.008", "data.max_length=30"], 50),
        (["training.batch_tokens=384", "optimizer.lr=0.004", "data.max_length=200"], 60),
    ],
    ids=["quick", "longer"],
)
def test_attention_learns_the_demo_and_its_alignments(
    more: list[str], least: float, train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    test = results(train_config(*SMALL, *more), tmp_path / "run")
    assert test["bleu"] > least
    assert test["aer"] < 0.2
