"""Settings and fixtures of all tests: one thread, a private cache, small configurations."""

import copy
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; workers share the cores

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from omegaconf import OmegaConf

from nmt.config.checks import config_dir, validated
from nmt.config.schema import TrainConfig
from nmt.evaluate.metrics import METRICS, Metric, ScoreSettings
from nmt.training import utilisation

torch.set_num_threads(1)
# Use the same examples each time, and no deadline, because a busy machine may slow any of them down.
settings.register_profile(
    "nmt", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nmt")

# A model and a corpus so small that a whole run takes seconds. Tests of its translations use more text.
TINY = [
    "data.train_size=300",
    "data.validation_size=8",
    "data.test_size=8",
    "tokenizer.vocab_size=800",  # most words are one token, so that there are fewer steps
    "data.max_length=24",  # the longest sentence of a batch sets the number of steps
    "embedding.dim=16",
    "encoder.hidden=16",
    "decoder.hidden=32",
    "training.batch_tokens=320",
    "training.max_epochs=1",
    "training.log_every=5",
    "search.beam_size=2",
    "validation.samples=0",  # a heatmap takes longer than ten updates
    "search.max_length=20",
    "device=cpu",
    "precision=fp32",
    "threads=1",
]


def pytest_collection_finish() -> None:
    """Keep garbage collection from visiting what was imported; nmt collects garbage when memory runs out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep prepared corpora out of the user's cache; all test workers share one cache."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["NMT_CACHE"] = str(root / "cache")
    yield
    del os.environ["NMT_CACHE"]


@pytest.fixture(autouse=True, scope="session")
def _quick_count_of_operations() -> Iterator[None]:
    """Count the operations of a run on one sentence pair in place of eight: it takes half the time of a tiny run."""
    before, utilisation.SENTENCES = utilisation.SENTENCES, 1
    yield
    utilisation.SENTENCES = before


@pytest.fixture(autouse=True)
def _logger() -> Iterator[None]:
    """Restore the package's logger, whose handler a command binds to the stream that pytest captures and closes."""
    logger = logging.getLogger("nmt")
    handlers, level, propagate = [*logger.handlers], logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signals_of_a_terminal() -> Iterator[None]:
    """Set the signal handlers that a terminal's process has: under nohup or with &, tests would ignore some signals."""
    fresh = {number: signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)}
    handlers = {signal.SIGINT: signal.default_int_handler, **fresh}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def values_of(command: str, overrides: list[str]) -> dict[str, Any]:
    """Compose a command's configuration with Hydra, as plain, resolved values."""
    return copy.deepcopy(_composed(command, tuple(overrides), os.environ.get("NMT_CACHE")))


@cache
def _composed(command: str, overrides: tuple[str, ...], _cache: str | None) -> dict[str, Any]:
    """Compose once per process, because it takes 0.1 to 0.3 s. `_cache` is the only value from the environment."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(command, overrides=list(overrides))
        if "thresholds" in composed.get("size", {}):  # size=auto would need a corpus
            composed = compose(command, overrides=[*overrides, "size=base"])
        values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def script(name: str) -> ModuleType:
    """Import a script; it can import other scripts, as when it is started."""
    folder = str(Path(__file__).parents[1] / "scripts")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def run_config(*overrides: str) -> TrainConfig:
    """Compose the typed configuration of a run."""
    return validated(TrainConfig, values_of("train", list(overrides)))


def tiny_config(*overrides: str) -> TrainConfig:
    """Compose the typed configuration of a tiny run: tiny_config("attention=none", ...)."""
    return run_config(*TINY, *overrides)


class MeanScore(Metric):
    """A made-up metric: each sentence has the score that its text spells, and a corpus their mean."""

    heading = "mean score"
    decimals = 4

    def count(
        self, hypotheses: Sequence[str], answers: Sequence[Sequence[str]], settings: ScoreSettings
    ) -> tuple[NDArray[np.int64], str]:
        """(N, 2): characters that agree with the reference, and 1."""
        pairs = zip(hypotheses, (own for own, *_ in answers), strict=True)
        agree = [sum(a == b for a, b in zip(*pair, strict=False)) for pair in pairs]
        return np.array([[count, 1] for count in agree]), "made up"

    def formula(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., 2) -> (...)."""
        return np.asarray(sums[..., 0] / sums[..., 1])


@pytest.fixture
def mean_metric(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add a metric that is a mean over sentences, and return its name."""
    monkeypatch.setitem(METRICS, "mean", MeanScore())
    return "mean"
