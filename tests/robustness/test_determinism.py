"""Runs in separate processes with equal seeds and numbers of threads give equal bits."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from kills import differing, outcome

from nmt.model.checkpoints import read_checkpoint, save_checkpoint

pytestmark = pytest.mark.system
SMALL = [
    *TINY,
    *("training.max_steps=5", "validation.unit=steps", "validation.every=3", "training.log_every=1"),
    *("data.train_size=200", "data.validation_size=6", "data.test_size=4", "tokenizer.vocab_size=300"),
]
CONFIGURATIONS = {
    "bahdanau": ["attention=bahdanau", "encoder.dropout=0.3", "embedding.word_dropout=0.1", "training.ema_decay=0.9"],
    "luong_local_p": ["attention=luong_local_p", "encoder=lstm", "decoder=lstm"],
    "hard": ["attention=hard", "tokenizer.sampling=0.1"],
    "r_drop": ["training.r_drop=1", "training.accumulate=2"],
    "search by sampling": ["search=sampling"],
}
EVERY = [pytest.param(name, threads, marks=pytest.mark.slow) for name in CONFIGURATIONS for threads in (1, 2)]


def trained(home: Path, name: str, threads: int) -> dict[str, object]:
    """Train in a process with a random hash seed, and return all results of the run except times."""
    given = {word.partition("=")[0]: word for word in [*SMALL, *CONFIGURATIONS[name], f"threads={threads}"]}
    if "search=sampling" in given.values():
        del given["search.beam_size"]
    subprocess.run(
        [Path(sys.executable).parent / "nmt-train", *given.values(), f"hydra.run.dir={home}"],
        # PASSIVE, because on a busy machine two threads that spin while they wait nearly stop.
        env=os.environ | {"PYTHONHASHSEED": "random", "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        check=True,
        timeout=240,
    )
    return {**outcome(home), "tokenizer": (home / "tokenizer.model").read_bytes()}


@pytest.mark.parametrize(("name", "threads"), EVERY)
def test_equal_seeds_give_equal_bits(name: str, threads: int, tmp_path: Path) -> None:
    one, other = (trained(tmp_path / part, name, threads) for part in ("one", "other"))
    assert one["metrics"]
    assert differing(one, other) == []


@pytest.mark.slow
def test_another_seed_gives_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trained(tmp_path / "one", "bahdanau", 1)
    monkeypatch.setitem(CONFIGURATIONS, "bahdanau", [*CONFIGURATIONS["bahdanau"], "seed=2"])
    found = differing(one, trained(tmp_path / "other", "bahdanau", 1))
    assert any(place.startswith("/last.pt/model") for place in found)
    assert not any(place.startswith("/tokenizer") for place in found)


def test_equal_parameters_and_scores_give_equal_files(tmp_path: Path) -> None:
    scores = {"bleu": 12.5, "loss": 1 / 3, "perplexity": math.inf}
    state = {"model": {"b": torch.ones(3), "a": torch.zeros(2, 2)}, "step": 7, "scores": scores}
    path, written = tmp_path / "best.safetensors", set()
    for _ in range(20):  # the library draws the order of the metadata anew for each file
        save_checkpoint(path, state)
        written.add(path.read_bytes())
    assert len(written) == 1
    assert read_checkpoint(path)["scores"] == scores
