"""A small model learns to translate the demo corpus and to align it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nmt.config.schema import TrainConfig
from nmt.training.job import train

SMALL = (
    "attention=luong_general decoder.input_feeding=false search.max_length=80 data.train_size=3000 "
    "data.validation_size=60 data.test_size=60 data.max_length=30 tokenizer=word "
    "tokenizer.vocab_size=1000 embedding.dim=64 encoder.hidden=64 decoder.hidden=128 optimizer.lr=0.008 "
    "training.batch_tokens=1024 training.max_epochs=8 training.label_smoothing=0.0 embedding.dropout=0.1 "
    "encoder.dropout=0.1 decoder.dropout=0.1 validation.every=8"
)


@pytest.mark.slow
@pytest.mark.system
def test_attention_learns_the_demo_and_its_alignments(train_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert train(train_config(*SMALL.split()), tmp_path, []) == 0
    test = json.loads((tmp_path / "results.json").read_text())["test"]
    assert test["bleu"] > 50
    assert test["aer"] < 0.2
