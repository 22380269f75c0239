"""Small trained runs that tests share; each test worker trains them once."""

from functools import cache
from pathlib import Path

import pytest
from conftest import tiny_config

from nmt.training.job import train

LINES = ["the cat sleeps .", "", "a small dog sees the red house .", "x", "the"]
TEXT = "".join(f"{line}\n" for line in LINES).encode()
CORPUS = ["data.train_size=400", "data.max_length=200"]


@cache
def trained(base: Path, name: str, *overrides: str) -> Path:
    assert train(tiny_config(*CORPUS, *overrides), base / name) == 0
    return base / name


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run that has learnt a little."""
    return trained(tmp_path_factory.getbasetemp(), "run", "decoder.readout=maxout")


@pytest.fixture(scope="session")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run without attention, with the tokenizer of `run`."""
    return trained(tmp_path_factory.getbasetemp(), "blind", "attention=none", "training.max_steps=2")


@pytest.fixture(scope="session")
def copying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run whose model copies source tokens."""
    overrides = ("attention=bahdanau", "decoder.copy=true", "training.max_steps=2")
    return trained(tmp_path_factory.getbasetemp(), "copying", *overrides)
